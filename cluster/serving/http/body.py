"""The bytes of a request's body, within limits of size and time."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.datastructures import Headers
    from starlette.requests import Request

    from cluster.serving.intake import IncomingMessage

__all__ = ["JSON_TYPE", "declared_length", "read_raw"]

JSON_TYPE = "application/json"

_MAX_DISCARDED_BYTES = 16 * 2**20
_PAUSE_S = 0.03
"""A client that pauses for so long is waiting for the response."""
# The unread rest of a body would be parsed as the next request.
_CLOSE = {"connection": "close"}


def declared_length(headers: Headers) -> int | None:
    """Return the length of the body that a request declares, or None.

    The parsers of other servers, such as Serve's, leave whitespace around it.
    """
    given = headers.get("content-length", "").strip(" \t")
    # Python refuses to read very long integers.
    return int(given.lstrip("0")[:20] or 0) if given.isdecimal() else None


async def read_raw(
    request: Request, incoming: IncomingMessage, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body; its bytes are counted in `incoming`.

    Raises HTTPException if it is too large, too slow or encoded, and OverloadedError if too many
    bytes are being received.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON_TYPE:
        raise HTTPException(415, f"Content-Type must be {JSON_TYPE}.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "Content-Encoding is not supported.")
    text = f"The body may have at most {max_bytes} bytes (--max-request-kib)."
    too_large = HTTPException(413, text, _CLOSE)
    if (declared_length(request.headers) or 0) > max_bytes:
        await _discard(request.stream())
        raise too_large
    # Reading and discarding share one stream: Starlette has none after the last chunk.
    stream = request.stream()
    chunks: list[bytes] = []
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in stream:
                incoming.add(len(chunk))
                if incoming.num_bytes > max_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError as error:
        text = f"The body did not arrive within {timeout_s:g} s (--read-timeout-s)."
        raise HTTPException(408, text, _CLOSE) from error
    if incoming.num_bytes > max_bytes:
        chunks.clear()
        incoming.shrink_to(0)
        await _discard(stream)
        raise too_large
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes]) -> None:
    """Read and drop part of a rejected body: a client that is still sending misses the response.

    A client that waits for the response before it sends gets it immediately.
    """
    num_bytes = 0
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_PAUSE_S) as pause:
            async for chunk in stream:
                num_bytes += len(chunk)
                if num_bytes > _MAX_DISCARDED_BYTES:
                    return
                pause.reschedule(asyncio.get_running_loop().time() + _PAUSE_S)
