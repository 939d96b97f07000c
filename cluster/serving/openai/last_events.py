"""The events that end OpenAI's streams of unnamed events, and the numbers of resumable ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.serving.http.errors import rejection_body

if TYPE_CHECKING:
    from pagedray.errors import PagedRayError

__all__ = ["DONE_EVENT", "error_event", "numbered_event"]

DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of every stream."""


def error_event(error: PagedRayError) -> bytes:
    """Return the event of an error that ends a stream, except for `DONE_EVENT`."""
    return b"data: %b\n\n" % msgspec.json.encode(rejection_body(error))


def numbered_event(event: bytes, number: int) -> bytes:
    """Return an event with its number as its id."""
    return b"id: %d\n%b" % (number, event)
