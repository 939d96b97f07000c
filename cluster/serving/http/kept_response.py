"""Large responses, which count as unread output until their clients have taken them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from starlette.responses import Response

from cluster.serving.http.http_call import JSON_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from cluster.serving.intake import OutputBuffer, OutputBuffers

__all__ = ["KeptResponse", "kept_if_large", "pieces_of", "whole_response"]

_LARGE_BYTES = 2**16
"""Bytes that a connection buffers anyway."""
_PIECE_BYTES = 2**16


class KeptResponse(Response):
    """A response that is sent in pieces, as its client reads."""

    def __init__(
        self,
        parts: Sequence[bytes],
        buffer: OutputBuffer,
        *,
        status: int = 200,
        headers: Mapping[str, str],
    ) -> None:
        """`parts` are counted in `buffer`, which is cleared once they are sent."""
        super().__init__(status_code=status, headers=headers)
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts
        self._buffer = buffer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            # The response to HEAD ends with its headers: the next request may follow at once.
            parts = () if scope["method"] == "HEAD" else self._parts
            for piece in pieces_of(parts):
                # While its client reads fast, sending waits for nothing.
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._buffer.clear()


def whole_response(
    parts: Sequence[bytes], buffer: OutputBuffer, *, headers: Mapping[str, str]
) -> Response:
    """Return the JSON response with these parts, counted in `buffer`."""
    if sum(map(len, parts)) > _LARGE_BYTES:
        return KeptResponse(parts, buffer, headers={"content-type": JSON_TYPE, **headers})
    buffer.clear()
    return Response(b"".join(parts), media_type=JSON_TYPE, headers=headers)


def kept_if_large(response: Response, buffers: OutputBuffers, tenant: str) -> Response:
    """Return a response of any kind to a tenant, counted if it is large.

    Raises OverloadedError, or InvalidRequestError, if it exceeds a limit.
    """
    body = response.body
    if type(response) is not Response or len(body) <= _LARGE_BYTES:
        return response
    buffer = buffers.open_buffer(tenant)
    buffer.collect(len(body))
    return KeptResponse(
        (bytes(body),), buffer, status=response.status_code, headers=dict(response.headers)
    )


def pieces_of(parts: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the parts that are sent at once; no part is empty."""
    pending: list[bytes] = []
    num_bytes = 0
    for part in parts:
        for at in range(0, len(part), _PIECE_BYTES):
            pending.append(part[at : at + _PIECE_BYTES])
            num_bytes += len(pending[-1])
            if num_bytes >= _PIECE_BYTES:
                yield b"".join(pending)
                pending, num_bytes = [], 0
    if pending:
        yield b"".join(pending)
