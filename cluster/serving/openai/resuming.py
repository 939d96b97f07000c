"""Event streams that continue when their connection is cut, and the calls that resume them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from starlette.responses import Response

from cluster.serving.http.endpoint import json_response
from cluster.serving.openai.event_stream import EventStream
from cluster.serving.openai.last_events import DONE_EVENT, error_event
from cluster.serving.resume.registry import StreamFormat
from pagedray.errors import InvalidRequestError, PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.openai.generation_response import GenerationResponse
    from cluster.serving.resume.stream import StreamReader
    from cluster.serving.servicer import GenerationCall, Servicer

__all__ = ["StreamHandlers", "format_of"]


def format_of(call: HttpCall, raw: bytes) -> StreamFormat:
    """Return the format of the stream of a request, given the bytes of its body."""
    path = call.request.scope["path"]
    return StreamFormat("http", path, hashlib.sha256(raw).digest())


class StreamHandlers:
    """Keeps streams, and answers the requests that resume or end them."""

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer

    def keep(
        self, generation: GenerationCall, response: GenerationResponse, form: StreamFormat
    ) -> EventStream:
        """Return the response to a call whose stream can be resumed."""
        events = response.numbered_events()
        reader = self._servicer.resumables.open_stream(generation, events, form)
        return _event_stream(generation.id, reader)

    def resume_post(self, call: HttpCall, number: int, form: StreamFormat) -> Response:
        """Return the response to a request that was sent again. Raises PagedRayError."""
        with call.metrics.counting_rejections("http"):
            if call.client_id is None:
                raise InvalidRequestError(
                    "Last-Event-ID requires the X-Request-Id of the stream.", param="X-Request-Id"
                )
            return self._resume(call, call.client_id, number, form)

    async def resume(self, call: HttpCall) -> Response:
        """Answer GET with the rest of a stream."""
        with call.metrics.counting_rejections("http"):
            return self._resume(call, call.path_value, call.last_event_number or 0, None)

    async def end(self, call: HttpCall) -> Response:
        """Answer DELETE: abort a call and forget its stream, if there is one."""
        self._servicer.abort_call(call.tenant.name, call.path_value)
        return json_response({"id": call.path_value, "object": "stream", "deleted": True})

    def _resume(
        self, call: HttpCall, client_id: str, number: int, form: StreamFormat | None
    ) -> Response:
        reader = self._servicer.resumables.resume_stream(
            call.tenant.name, client_id, number, protocol="http", form=form
        )
        call.metrics.count_resume("http")
        if reader is None:
            # An EventSource asks again until it gets this status.
            return Response(status_code=204)
        return _event_stream(client_id, reader)


def _event_stream(request_id: str, reader: StreamReader) -> EventStream:
    return EventStream(request_id, _events(reader), close=reader.close)


async def _events(reader: StreamReader) -> AsyncGenerator[bytes]:
    try:
        async for events in reader:
            yield b"".join(events)
    except PagedRayError as error:
        yield error_event(error)
        yield DONE_EVENT
