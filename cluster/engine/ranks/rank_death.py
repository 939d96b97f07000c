"""Why a rank has died, according to Ray."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["cause_of", "find_cause"]

_CAUSE_TIMEOUT_S = 1.0
"""Ray reports the cause of a death shortly after the rank's socket closes."""
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?\.)(?:\s|$)")


# Any: the type of Ray's references depends on how Ray was built.
def find_cause(running: Sequence[Any]) -> str | None:
    """Return why one of the ranks of `running` has died; None if Ray gives no reason."""
    deadline_s = time.monotonic() + _CAUSE_TIMEOUT_S
    cause: RayError | None = None
    waiting = list(running)
    while waiting and (left_s := deadline_s - time.monotonic()) > 0.0:
        finished, waiting = ray.wait(waiting, timeout=left_s)
        for reference in finished:
            try:
                ray.get(reference)
            except RayActorError as death:
                return cause_of(death)
            except RayError as failure:
                # Its steps failed, which may be because another rank has died.
                cause = failure
    return None if cause is None else cause_of(cause)


def cause_of(error: RayError) -> str:
    """Return Ray's cause of death in one sentence."""
    text = str(error)
    if found := _EXIT_DETAIL.search(text):
        return found[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.') if lines else type(error).__name__}."
