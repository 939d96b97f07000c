"""Answers a call that generates: with a stream of events, or once the response is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cluster.serving.http.kept_response import whole_response
from cluster.serving.openai.event_stream import EventStream, unless_disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.responses import Response

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.servicer import GenerationCall, Servicer

__all__ = ["answer_call"]


class _Body(Protocol):
    """The response in the shape of one API."""

    def events(self) -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        """Yield server-sent events, large ones in parts; an error becomes the last one."""

    async def complete(self, buffer: OutputBuffer) -> Sequence[bytes]:
        """Return the response once it is complete; its parts are counted in `buffer`."""


async def answer_call(
    servicer: Servicer,
    call: HttpCall,
    generation: GenerationCall,
    body: _Body,
    *,
    is_stream: bool,
    waiting_event: bytes | None = None,
) -> Response:
    """Return the HTTP response. Raises PagedRayError if a complete response fails.

    A stream sends `waiting_event`, if any, after every 15 seconds without an event.
    """
    if is_stream:
        return EventStream(
            generation.id,
            body.events(),
            close=generation.close,
            take_progress=None if call.continuation is None else generation.follow_progress(),
            waiting_event=waiting_event,
        )
    buffer = servicer.buffers.open_buffer(call.tenant.name)
    try:
        parts = await unless_disconnected(call.request.receive, body.complete(buffer))
    except BaseException:
        buffer.clear()
        raise
    finally:
        generation.close()
    return whole_response(parts, buffer, headers={"x-request-id": generation.id})
