"""Counts the headers and chunks of a request, and limits their numbers.

Each takes time on the event loop, even a short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

__all__ = ["FREE_CHUNKS", "MAX_HEADERS", "MIN_CHUNK_BYTES", "RequestParts"]

MAX_HEADERS = 128
"""Headers and trailers of a request."""
MIN_CHUNK_BYTES = 64
"""Minimum average size of a body's chunks."""
FREE_CHUNKS = 256
"""Chunks of a body that may be smaller."""


@dataclass(slots=True)
class RequestParts:
    """Counts of a request's headers and chunks."""

    num_headers: int = 0
    """Number of headers and trailers."""
    num_chunks: int = 0
    """Pieces in which the parser has found the body."""
    num_body_bytes: int = 0

    @property
    def has_many_headers(self) -> bool:
        """Whether there are more headers and trailers than a request may have."""
        return self.num_headers > MAX_HEADERS

    @property
    def has_small_chunks(self) -> bool:
        """Whether the chunks of the body are too small on average."""
        return self.num_chunks > FREE_CHUNKS + self.num_body_bytes // MIN_CHUNK_BYTES

    def rejection(self) -> tuple[HTTPStatus, str] | None:
        """Return the status and the reason with which to reject the request, if it has too many."""
        if self.has_many_headers:
            reason = f"A request may have at most {MAX_HEADERS} headers."
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, reason
        if self.has_small_chunks:
            return HTTPStatus.BAD_REQUEST, (
                f"The chunks of a body must have {MIN_CHUNK_BYTES} bytes on average after the "
                f"first {FREE_CHUNKS}."
            )
        return None
