"""The streams that clients may resume, by tenant and by the id that the client knows."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from cluster.serving.auth import ANONYMOUS
from cluster.serving.intake import OutputBuffer, TenantBytes
from pagedray.errors import (
    DuplicateIdError,
    ForbiddenError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    StreamTakenError,
    UnknownStreamError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from cluster.serving.generation_call import GenerationCall
    from cluster.serving.intake import ReaderLimits

__all__ = ["ResumableStreams", "StreamFormat", "StreamReader"]

logger = logging.getLogger(__name__)

_STREAM_BYTES = 4096
"""Memory of a stream without messages."""
_RETRY_S = 5.0
_EXTRA_S = 10.0
_LATE_S = 1.0
"""A timer that is later than this was delayed by a server that paused, as requests were."""

_MOST_TAKEN_BYTES = 2**16
"""A reader takes messages at once until they have this many bytes."""
_MESSAGE_BYTES = 240
"""Memory of a message without its content: its header, two entries of dictionaries, an integer."""


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """Properties that a client must repeat to resume a stream."""

    protocol: Literal["http", "grpc"]
    name: str
    """The path or the method of its messages."""
    digest: bytes = b""
    """Identifies the body of an HTTP request."""


class _Entry:
    """One stream, and when it expires."""

    __slots__ = ("buffer", "format", "is_extended", "stream", "tenant", "timer")

    def __init__(self, tenant: str, form: StreamFormat, buffer: OutputBuffer) -> None:
        self.tenant = tenant
        self.format = form
        self.buffer = buffer
        self.stream: ResumableStream
        self.timer: asyncio.TimerHandle | None = None
        self.is_extended = False
        """Whether the grace period was extended, because requests were delayed."""

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class ResumableStreams:
    """The streams of a server that can be resumed. Used from the event loop only."""

    def __init__(self, limits: ReaderLimits) -> None:
        self._grace_s = limits.resume_grace_s
        self._allows_anonymous = limits.resumes_anonymous
        self._bytes = TenantBytes(limits.resume_buffer)
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._num_by_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all streams."""
        return self._bytes.num_bytes

    @property
    def num_awaited(self) -> int:
        """Number of streams with clients that have not read everything and may come back."""
        return sum(
            not (entry.stream.has_reader or entry.stream.is_delivered)
            for entry in self._entries.values()
        )

    def has_streams(self, tenant: str) -> bool:
        """Return whether a tenant has any stream."""
        return tenant in self._num_by_tenant

    def check_allowed(self, tenant: str, *, repeats_body: bool) -> None:
        """Raise UnsupportedError or ForbiddenError if the tenant's streams cannot be resumed.

        A client that `repeats_body` proves that it sent the request, which an id does not: without
        keys, all ids are in `/loads`.
        """
        if self._grace_s is None:
            raise UnsupportedError(
                "This server does not support resumable streams: Ray Serve binds a stream to its "
                "replica, and `pagedray serve` disables them with --resume-grace-s 0."
            )
        if tenant == ANONYMOUS.name and not (repeats_body or self._allows_anonymous):
            raise ForbiddenError(
                "Without API keys, a stream is only resumed over HTTP, by sending its POST again "
                "with X-Request-Id and Last-Event-ID, because anyone can learn its id; `pagedray "
                "serve --resume-anonymous` allows GET and gRPC."
            )

    def check_id(self, tenant: str, client_id: str) -> None:
        """Raise DuplicateIdError if a stream of the tenant has the id."""
        if (tenant, client_id) in self._entries:
            raise DuplicateIdError(client_id, is_resumable=True)

    def check_room(self, tenant: str) -> None:
        """Raise OverloadedError if there is no room for another stream of the tenant."""
        self._make_room(tenant, _STREAM_BYTES)
        if self._bytes.full_scope(tenant, _STREAM_BYTES) is not None:
            raise OverloadedError(
                "The memory for resumable streams is in use by streams that are not read; resume "
                "or abort them first.",
                retry_after_s=_RETRY_S,
            )

    def open_stream(
        self,
        generation: GenerationCall,
        batches: AsyncGenerator[Sequence[bytes]],
        form: StreamFormat,
    ) -> StreamReader:
        """Keep the messages of a call, which the stream closes; return their first reader."""
        tenant = generation.tenant
        key = tenant, generation.id
        assert key not in self._entries
        buffer = OutputBuffer(self._bytes, tenant)
        buffer.hold(_STREAM_BYTES)
        entry = _Entry(tenant, form, buffer)
        entry.stream = ResumableStream(
            generation,
            buffer=buffer,
            make_room=lambda num_bytes: self._make_room_in(entry, num_bytes),
            note_detached=lambda: self._start_timer(key, entry),
        )
        self._entries[key] = entry
        self._num_by_tenant[tenant] = self._num_by_tenant.get(tenant, 0) + 1
        entry.stream.start(batches)
        return entry.stream.attach_reader(0)

    def resume_stream(
        self,
        tenant: str,
        client_id: str,
        number: int,
        *,
        protocol: Literal["http", "grpc"],
        form: StreamFormat | None = None,
    ) -> StreamReader | None:
        """Return a reader of a tenant's own stream after the message `number`; None at its end.

        Without a format, any format of the protocol will do. Raises UnknownStreamError, or
        InvalidRequestError if the request differs.
        """
        self.check_allowed(tenant, repeats_body=form is not None and bool(form.digest))
        entry = self._entries.get((tenant, client_id))
        if (
            entry is None
            or entry.format.protocol != protocol
            or (form is not None and form.name != entry.format.name)
            or not entry.stream.can_resume(number)
        ):
            raise UnknownStreamError
        if form is not None and form.digest != entry.format.digest:
            raise InvalidRequestError(
                "The body differs from the one of the stream that Last-Event-ID resumes."
            )
        if entry.stream.ends_at(number):
            # Its grace period continues: a client that tries again and again must not keep the
            # stream.
            return None
        entry.stop_timer()
        return entry.stream.attach_reader(number)

    def end_stream(self, tenant: str, client_id: str) -> None:
        """Abort a stream and forget it; ignore an unknown stream."""
        entry = self._entries.get((tenant, client_id))
        if entry is None:
            return
        self._forget((tenant, client_id), entry)
        if entry.stream.has_reader:
            # It still reads the generated tokens.
            entry.stream.abort()
        else:
            entry.stream.close()

    def close(self) -> None:
        """Close all streams."""
        for key, entry in list(self._entries.items()):
            self._forget(key, entry)
            entry.stream.close()

    def _start_timer(self, key: tuple[str, str], entry: _Entry) -> None:
        if self._entries.get(key) is not entry:
            # It was ended while it had a reader.
            entry.stream.close()
            return
        assert self._grace_s is not None
        entry.stop_timer()
        entry.is_extended = False
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_later(self._grace_s, self._expire, key, entry)

    def _expire(self, key: tuple[str, str], entry: _Entry) -> None:
        assert entry.timer is not None
        loop = asyncio.get_running_loop()
        is_late = loop.time() - entry.timer.when() > _LATE_S
        if is_late and not entry.is_extended:
            # The server was busy: a request to resume the stream may have arrived.
            entry.is_extended = True
            entry.timer = loop.call_later(_EXTRA_S, self._expire, key, entry)
            return
        self._forget(key, entry)
        entry.stream.close()

    def _forget(self, key: tuple[str, str], entry: _Entry) -> None:
        entry.stop_timer()
        if self._entries.get(key) is not entry:
            return
        del self._entries[key]
        left = self._num_by_tenant.pop(entry.tenant) - 1
        if left:
            self._num_by_tenant[entry.tenant] = left

    def _make_room_in(self, entry: _Entry, num_bytes: int) -> None:
        """Drop delivered messages until `num_bytes` more fit in the stream's buffer."""
        stream, most = entry.stream, self._bytes.limits.call_bytes
        excess = entry.buffer.num_bytes + num_bytes - most
        # Messages on their way when the connection was cut did not reach the client.
        num_lost = 0 if stream.has_reader else most // 2
        if excess > 0 and stream.num_delivered_bytes > num_lost:
            # More than needed, so that the next messages find room.
            num_dropped = max(excess, most // 16)
            stream.drop_delivered(min(num_dropped, stream.num_delivered_bytes - num_lost))
        self._make_room(entry.tenant, num_bytes)

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        """Drop delivered messages of the largest streams until `num_bytes` more fit."""
        while True:
            scope = self._bytes.full_scope(tenant, num_bytes)
            if scope is None:
                return
            streams = [
                entry.stream
                for entry in self._entries.values()
                if scope == "server" or entry.tenant == tenant
            ]
            largest = max(streams, key=lambda one: one.num_delivered_bytes, default=None)
            if largest is None or not largest.num_delivered_bytes:
                return
            largest.drop_delivered(max(num_bytes, largest.num_delivered_bytes // 2))


class ResumableStream:
    """One stream; its owner closes it after the grace period. Used from the event loop only."""

    def __init__(
        self,
        generation: GenerationCall,
        *,
        buffer: OutputBuffer,
        make_room: Callable[[int], None],
        note_detached: Callable[[], None],
    ) -> None:
        """Messages are counted in `buffer`; `make_room` frees bytes for the next message.

        `note_detached` is called when the reader leaves.
        """
        self.id = generation.id
        self.is_finished = False
        """Whether no message will follow."""
        self._generation = generation
        self._buffer = buffer
        self._make_room = make_room
        self._note_detached = note_detached
        self._messages = KeptMessages()
        self._num_sent = 0
        """The last number that any reader has taken."""
        self._num_delivered = 0
        """The last number that the current or last reader has taken."""
        self._error: PagedRayError | None = None
        self._reader: StreamReader | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def has_reader(self) -> bool:
        """Whether a client reads the stream."""
        return self._reader is not None

    @property
    def is_delivered(self) -> bool:
        """Whether it is finished and a reader has taken all messages."""
        return self.is_finished and self._num_delivered == self._messages.last

    @property
    def num_delivered_bytes(self) -> int:
        """Bytes of messages that its reader has taken; they can be dropped."""
        return self._messages.num_bytes_to(self._num_delivered)

    def start(self, batches: AsyncGenerator[Sequence[bytes]]) -> None:
        """Keep the messages that are generated, which are numbered from 1."""
        self._task = asyncio.get_running_loop().create_task(self._keep_all(batches))

    def can_resume(self, number: int) -> bool:
        """Return whether the message `number` was sent and all that follow it are kept."""
        return self._messages.first - 1 <= number <= self._num_sent

    def ends_at(self, number: int) -> bool:
        """Return whether nothing follows the message `number`."""
        return self.is_finished and self._error is None and number == self._messages.last

    def attach_reader(self, number: int) -> StreamReader:
        """Return a reader of the messages after `number`, instead of the current reader."""
        assert self._messages.first - 1 <= number <= self._messages.last
        taken, self._reader = self._reader, StreamReader(self, number)
        if taken is not None:
            taken.wake()
        self._num_delivered = number
        return self._reader

    def detach_reader(self, reader: StreamReader) -> None:
        """Continue without the reader, unless another reader has replaced it."""
        if self._reader is reader:
            self._reader = None
            self._note_detached()

    def take_messages(self, reader: StreamReader, number: int) -> list[bytes]:
        """Return messages after `number`. Raises StreamTakenError, or the error of the call."""
        if self._reader is not reader:
            raise StreamTakenError
        taken = self._messages.take(number, _MOST_TAKEN_BYTES)
        self._num_delivered = number + len(taken)
        self._num_sent = max(self._num_sent, self._num_delivered)
        if not taken and self._error is not None:
            raise self._error
        return taken

    def drop_delivered(self, num_bytes: int) -> None:
        """Drop the oldest delivered messages, of at least `num_bytes` if there are that many."""
        num_dropped = 0
        while num_dropped < num_bytes and self._messages.first <= self._num_delivered:
            num_dropped += self._messages.drop_first()
        self._buffer.remove(num_dropped)

    def abort(self) -> None:
        """End generation; the messages end with the text generated so far."""
        if not self.is_finished:
            self._generation.abort()

    def close(self) -> None:
        """Abort generation and drop all messages; idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._generation.close()
        self._messages.clear()
        self._buffer.clear()
        self.is_finished = True
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.wake()

    async def _keep_all(self, batches: AsyncGenerator[Sequence[bytes]]) -> None:
        try:
            async with aclosing(batches):
                async for batch in batches:
                    for message in batch:
                        self._keep(message)
                    if self._reader is not None:
                        self._reader.wake()
        except PagedRayError as error:
            self._error = error
            self._generation.close(error)
        except Exception as error:
            logger.error("A resumable stream failed.", exc_info=error)
            self._error = InternalError()
        finally:
            self.is_finished = True
            self._generation.close()
            if self._reader is not None:
                self._reader.wake()

    def _keep(self, message: bytes) -> None:
        """Append a message. Raises UnreadError if there is no room."""
        num_bytes = memory_of(message)
        self._make_room(num_bytes)
        self._buffer.add(num_bytes)
        self._messages.append(message)


class StreamReader:
    """Reads messages of a stream, several at once, until they end or another call resumes it."""

    def __init__(self, stream: ResumableStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[bytes]:
        while True:
            messages = self._stream.take_messages(self, self._number)
            if messages:
                self._number += len(messages)
                return messages
            if self._stream.is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        """Let the waiting reader check for messages."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Leave the stream, which can be resumed; idempotent."""
        self._stream.detach_reader(self)


def memory_of(message: bytes) -> int:
    """Return the bytes that a message takes while it is kept."""
    return len(message) + _MESSAGE_BYTES


class KeptMessages:
    """Messages numbered from 1. All methods but `take` and `clear` take O(1)."""

    def __init__(self) -> None:
        self.first = 1
        """The oldest kept number, or the next number if no message is kept."""
        self.last = 0
        """The last number so far."""
        self._messages: dict[int, bytes] = {}
        self._ends: dict[int, int] = {}
        """Bytes of all messages up to the end of each kept message, dropped messages included."""
        self._num_dropped_bytes = 0

    def append(self, message: bytes) -> None:
        """Keep the next message."""
        end = self._ends.get(self.last, self._num_dropped_bytes) + memory_of(message)
        self.last += 1
        self._messages[self.last] = message
        self._ends[self.last] = end

    def num_bytes_to(self, number: int) -> int:
        """Return the bytes of the messages that are kept up to `number`."""
        return self._ends.get(number, self._num_dropped_bytes) - self._num_dropped_bytes

    def take(self, number: int, num_bytes: int) -> list[bytes]:
        """Return messages after `number`, until they have at least `num_bytes`; they are kept."""
        taken: list[bytes] = []
        while number < self.last and num_bytes > 0:
            number += 1
            taken.append(self._messages[number])
            num_bytes -= memory_of(taken[-1])
        return taken

    def drop_first(self) -> int:
        """Drop the oldest message, and return its bytes."""
        self._num_dropped_bytes = self._ends.pop(self.first)
        message = self._messages.pop(self.first)
        self.first += 1
        return memory_of(message)

    def clear(self) -> None:
        """Drop all messages; no other may follow."""
        self._messages.clear()
        self._ends.clear()
        self.first = self.last + 1
