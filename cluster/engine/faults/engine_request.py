"""Requests of the engine itself, which test whether its ranks work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.scheduling.event import TokenEvent

__all__ = ["client_events", "make_engine_request"]

_ID_PREFIX = "engine-"
# A tenant's only request always has room in the queue, and no client's tenant begins like this.
_TENANT_PREFIX = "\0"


def make_engine_request(name: str, *, max_tokens: int) -> Request:
    """Return a greedy request with a prompt of one token, which a full queue accepts.

    No other open request may have this `name`.
    """
    return Request(
        id=f"{_ID_PREFIX}{name}",
        prompt_token_ids=(0,),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        tenant=f"{_TENANT_PREFIX}{name}",
    )


def client_events(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Return the events of the requests that clients sent."""
    return [event for event in events if not event.request_id.startswith(_ID_PREFIX)]
