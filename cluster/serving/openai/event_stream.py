"""Responses that end when their client disconnects: event streams, and awaited work.

A stream that can be resumed continues without its response.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from cluster.serving.continuation import PROGRESS_KEY
from cluster.serving.http.kept_response import pieces_of, whole_response
from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence

    from starlette.types import Receive, Scope, Send

    from cluster.serving.continuation import Encoded
    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.intake import OutputBuffer
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Servicer, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.turns import Turns

__all__ = ["EventResponse", "EventStream", "answer_call", "unless_disconnected"]

Result = TypeVar("Result")
_OUTPUT_BYTES = 128
"""Memory of an output without its content."""

_PAUSE_S = 0.002
"""Between the parts of a large event."""
_INTERVAL_S = 15.0
"""Proxies and clients often close a connection on which nothing arrives for a minute or more."""


class EventStream(Response):
    """Server-sent events, until they end or their client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        request_id: str,
        events: AsyncGenerator[bytes | tuple[bytes, ...]],
        *,
        close: Callable[[], None],
        take_progress: Callable[[], Encoded] | None = None,
        waiting_event: bytes | None = None,
    ) -> None:
        """`close` ends the source of the events.

        `take_progress` returns the progress since the last call; it is sent with the events.
        `waiting_event` is sent after every 15 seconds without an event.
        """
        super().__init__(
            headers={
                "x-request-id": request_id,
                "cache-control": "no-store",
                # A buffering proxy would delay tokens.
                "x-accel-buffering": "no",
            }
        )
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._take_progress = take_progress
        self._waiting_event = waiting_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._write(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            if self._waiting_event is None:
                async for written in events:
                    await self._send_event(written, send)
            else:
                await self._write_all(events, self._waiting_event, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_all(
        self, events: AsyncIterator[bytes | tuple[bytes, ...]], waiting_event: bytes, send: Send
    ) -> None:
        """Send the events, and others while there are none."""
        loop = asyncio.get_running_loop()
        sending = asyncio.Lock()
        last_s = loop.time()

        async def send_waiting_events() -> None:
            nonlocal last_s
            while True:
                passed_s = 0.0 if sending.locked() else loop.time() - last_s
                if passed_s >= _INTERVAL_S:
                    async with sending:
                        await self._send_event(waiting_event, send)
                    last_s, passed_s = loop.time(), 0.0
                await asyncio.sleep(_INTERVAL_S - passed_s)

        task = asyncio.create_task(send_waiting_events())
        try:
            async for written in events:
                async with sending:
                    await self._send_event(written, send)
                last_s = loop.time()
        finally:
            task.cancel()
            # If the client does not read, sending the next event fails as well.
            await asyncio.gather(task, return_exceptions=True)

    async def _send_event(self, written: bytes | tuple[bytes, ...], send: Send) -> None:
        if self._take_progress is None:
            if isinstance(written, tuple):
                await _send_parts(written, send)
                return
            await send({"type": "http.response.body", "body": written, "more_body": True})
            return
        if isinstance(written, tuple):
            written = b"".join(written)
        await send(
            {
                "type": "http.response.body",
                "body": written,
                "more_body": True,
                PROGRESS_KEY: self._take_progress(),
            }
        )


async def _send_parts(parts: tuple[bytes, ...], send: Send) -> None:
    """Send large events as the client reads them."""
    for number, piece in enumerate(pieces_of(parts)):
        if number:
            # While its client reads fast, sending waits for nothing, but others have tokens to
            # send.
            await asyncio.sleep(_PAUSE_S)
        await send({"type": "http.response.body", "body": piece, "more_body": True})


async def unless_disconnected(receive: Receive, work: Coroutine[None, None, Result]) -> Result:
    """Return the result of `work`; cancel it and raise ClientDisconnect when the client leaves."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Body(Protocol):
    """The response in the shape of one API."""

    def events(self) -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        """Yield server-sent events, large events in parts; an error becomes the last event."""

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


class EventResponse(ABC):
    """The response to a call of one sequence."""

    def __init__(self, generation: GenerationCall, turns: Turns) -> None:
        self._generation = generation
        self._turns = turns
        self._turn = turns.begin_turn() if turns.are_read else None
        self._num_events = 0
        """Events that were written, in an API that numbers them."""

    async def complete(self, buffer: OutputBuffer) -> Sequence[bytes]:
        """Return the response once it is complete. Raises PagedRayError.

        Its parts are counted in `buffer` while they are collected.
        """
        usage = last = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for output in outputs:
                usage = output.usage
                (last,) = output.sequences
                error = last.failure
                try:
                    if error is not None:
                        raise error
                    buffer.collect(_OUTPUT_BYTES + len(last.text))
                except PagedRayError as rejection:
                    self._generation.close(rejection)
                    raise
                self._collect(self._delta(last))
        assert usage is not None
        assert last is not None
        await asyncio.sleep(0)
        parts = self._encode_response(last, usage)
        # It may repeat more of the request than was generated.
        buffer.collect(sum(map(len, parts)))
        return parts

    async def events(self) -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        """Yield server-sent events, large events in parts; an error becomes the last event."""
        if self._generation.replayed is not None:
            # The client has received these events, perhaps in smaller pieces.
            self._encode_events(self._generation.replayed)
            assert self._generation.continuation is not None
            self._num_events = self._generation.continuation.num_events
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = self._encode_events(output)
                    if written:
                        yield written
                    for sequence in output.sequences:
                        if (error := sequence.failure) is not None:
                            raise error
        except Exception as error:
            yield self._error_event(self._generation.end_with(error))

    def _delta(self, sequence: SequenceOutput) -> TurnDelta:
        if self._turn is None:
            return TurnDelta(content=sequence.text)
        return self._turn.read(sequence)

    @abstractmethod
    def _collect(self, delta: TurnDelta) -> None:
        """Add the turn's progress to the complete response."""

    @abstractmethod
    def _encode_response(self, last: SequenceOutput, usage: Usage) -> Sequence[bytes]:
        """Return the parts of the complete response; `last` is the last output."""

    @abstractmethod
    def _encode_events(self, output: GenerationOutput) -> bytes | tuple[bytes, ...]:
        """Return the events of the next output, none for an error; large events in parts."""

    @abstractmethod
    def _error_event(self, error: PagedRayError) -> bytes:
        """Return the event of an error."""
