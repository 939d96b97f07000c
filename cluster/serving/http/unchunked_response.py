"""Responses without a length to clients of HTTP/1.0, which does not have chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

__all__ = ["disable_chunks"]


def disable_chunks(cycle: RequestResponseCycle) -> None:
    """Let the end of the connection end a response without a length, as HTTP/1.0 requires."""
    cycle.chunked_encoding = False
    send = cycle.send

    async def send_unchunked(message: ASGISendEvent) -> None:
        if message["type"] == "http.response.body":
            # uvicorn compares it with the length of the body, which it does not know.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]  # uvicorn makes the cycle
