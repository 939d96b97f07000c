"""A thread that shows that a rank's process runs, even during a long call of its other thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.rank_progress import ProgressWord

__all__ = ["start_heartbeat"]

_INTERVAL_S = 0.5
_NUM_QUIET_BEATS = 2
"""Heartbeats without progress of the rank after which to look for a compiler process."""


def start_heartbeat(progress: ProgressWord) -> None:
    """Write heartbeats for as long as the process lives."""
    threading.Thread(
        target=_beat_forever, args=(progress,), name="pagedray-heartbeat", daemon=True
    ).start()


def _beat_forever(progress: ProgressWord) -> None:
    # Waiting for an event, unlike sleeping, is not affected by a change of the clock.
    never = threading.Event()
    word, num_quiet = -1, 0
    while True:
        num_quiet = num_quiet + 1 if progress.word == word else 0
        word = progress.word
        progress.beat(is_compiling=num_quiet >= _NUM_QUIET_BEATS and _has_children())
        never.wait(_INTERVAL_S)


def _has_children() -> bool:
    """Return whether this process waits for others: compilers, such as nvcc, ptxas or gcc."""
    try:
        threads = tuple(Path("/proc/self/task").iterdir())
    except OSError:
        # This process may open no more files.
        return False
    for thread in threads:
        try:
            if (thread / "children").read_text().strip():
                return True
        except OSError:
            # The thread has ended, or the kernel has no such file.
            continue
    return False
