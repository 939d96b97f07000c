"""The streams that clients may resume, by tenant and by the id that the client knows."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.serving.auth.tenant import ANONYMOUS
from cluster.serving.memory.output_buffer import OutputBuffer
from cluster.serving.memory.tenant_bytes import TenantBytes
from cluster.serving.resume.stream import ResumableStream, StreamReader
from pagedray.errors import (
    DuplicateIdError,
    ForbiddenError,
    InvalidRequestError,
    OverloadedError,
    UnknownStreamError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cluster.serving.calls.generation_call import GenerationCall
    from cluster.serving.memory.reader_limits import ReaderLimits

__all__ = ["ResumableStreams", "StreamFormat"]

_STREAM_BYTES = 4096
"""Memory of a stream without messages."""
_RETRY_S = 5.0
_EXTRA_S = 10.0
_LATE_S = 1.0
"""A timer that is later than this was delayed by a server that paused, as requests were."""


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
