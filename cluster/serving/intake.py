"""The limits that frontends apply before and while they read requests."""

from __future__ import annotations

import asyncio
import ctypes
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pagedray.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnreadError
from pagedray.machine import start_threads
from pagedray.sampling_params import MAX_N

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.config import EngineConfig

__all__ = [
    "LARGEST",
    "MAX_REQUEST_BYTES",
    "BufferLimits",
    "IncomingMessage",
    "Intake",
    "IntakeLimits",
    "MemoryTrimmer",
    "OutputBuffer",
    "OutputBuffers",
    "ReaderLimits",
    "Reception",
    "RequestSize",
    "TenantBytes",
    "check_num_messages",
    "request_size",
]

_INLINE_BYTES = 2**15
"""The largest request that is parsed on the event loop."""
_POLL_S = 0.01
Result = TypeVar("Result")
MAX_REQUEST_BYTES = 4 * 2**20
"""The longest message or body unless an operator allows longer ones."""
_BASE_BYTES = 2**20
"""Bytes for everything but prompts, such as schemas and tools."""
_BYTES_PER_TOKEN = 8
"""A token id in JSON, with its comma."""
_LIST_VALUES = 2**13
"""Entries that a list may have even if the context is shorter."""
_OTHER_VALUES = 2**15
_MAX_VALUES = 2**20
_MIN_MESSAGES = 64
_MAX_MESSAGES = 4096

_RETRY_S = 5.0
_DELAY_S = 1.0
_MOST_DELAYS = 5
_LARGE_BYTES = 2**14
_MUCH_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of memory that all calls share."""

    total_bytes: int = 256 * 2**20
    """The limit for all calls together."""

    @property
    def tenant_bytes(self) -> int:
        """The limit for the calls of one tenant."""
        return self.total_bytes // 4

    @property
    def call_bytes(self) -> int:
        """The limit for one call."""
        return self.total_bytes // 32


class TenantBytes:
    """The bytes of a server's calls. Used from the event loop only."""

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self._by_tenant: dict[str, int] = {}
        self.num_bytes = 0
        """Number of bytes of all calls."""

    def held_by(self, tenant: str) -> int:
        """Return the bytes of a tenant's calls."""
        return self._by_tenant.get(tenant, 0)

    def full_scope(self, tenant: str, num_bytes: int) -> Literal["tenant", "server"] | None:
        """Return the owner of the limit that this many more bytes exceed; None if they fit."""
        if self.held_by(tenant) + num_bytes > self.limits.tenant_bytes:
            return "tenant"
        return "server" if self.num_bytes + num_bytes > self.limits.total_bytes else None

    def count(self, tenant: str, num_bytes: int) -> None:
        """Add bytes to the counts, or subtract them, regardless of the limits."""
        self.num_bytes += num_bytes
        held = self.held_by(tenant) + num_bytes
        if held:
            self._by_tenant[tenant] = held
        else:
            self._by_tenant.pop(tenant, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """The limits on readers of streams."""

    write_timeout_s: float = 60.0
    """How long a client's connection may take to accept one message."""
    unread_buffer: BufferLimits = field(default_factory=BufferLimits)
    """Memory for output that waits for its client to read."""
    resume_grace_s: float | None = None
    """How long a stream without a reader can be resumed; None disables resumable streams."""
    resumes_anonymous: bool = False
    """Whether an id is enough to resume a stream if no API keys are required."""
    resume_buffer: BufferLimits = field(default_factory=BufferLimits)
    """Memory for the messages of streams that can be resumed."""


class OutputBuffers:
    """The buffers of a server. Used from the event loop only."""

    def __init__(
        self, limits: BufferLimits, *, note_freed: Callable[[int], None] | None = None
    ) -> None:
        """`note_freed` is called with the bytes of each response that is not kept any longer."""
        self._limits = limits
        self._bytes = TenantBytes(limits)
        self._note_freed = note_freed

    @property
    def num_bytes(self) -> int:
        """Number of bytes in all buffers."""
        return self._bytes.num_bytes

    def open_buffer(self, tenant: str) -> OutputBuffer:
        """Return an empty buffer for a call of a tenant."""
        return OutputBuffer(self._bytes, tenant, self._note_freed)

    def check_room(self, tenant: str) -> None:
        """Raise OverloadedError while the tenant's calls, or all calls, are at their limit.

        A new call starts only if the largest call would have room.
        """
        scope = self._bytes.full_scope(tenant, self._limits.call_bytes)
        if scope == "tenant":
            raise OverloadedError(
                f"The server keeps {self._bytes.held_by(tenant)} bytes of output that clients of "
                "this tenant have not read; read or abort the open streams first.",
                retry_after_s=_RETRY_S,
            )
        if scope == "server":
            raise OverloadedError(
                "The server's memory for unread output is in use; retry later.",
                retry_after_s=_RETRY_S,
            )


class OutputBuffer:
    """The bytes that are kept for one call."""

    __slots__ = ("_bytes", "_note_freed", "_tenant", "num_bytes")

    def __init__(
        self, of_all: TenantBytes, tenant: str, note_freed: Callable[[int], None] | None = None
    ) -> None:
        """The bytes also count among those `of_all` calls.

        `note_freed` is called with their number when they are not kept any longer.
        """
        self._bytes = of_all
        self._tenant = tenant
        self._note_freed = note_freed
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises UnreadError beyond a limit; then they are not counted."""
        limits = self._bytes.limits
        if self.num_bytes + num_bytes > limits.call_bytes:
            raise UnreadError("call", limits.call_bytes)
        scope = self._bytes.full_scope(self._tenant, num_bytes)
        if scope == "tenant":
            raise UnreadError("tenant", limits.tenant_bytes)
        if scope == "server":
            raise UnreadError("server", limits.total_bytes)
        self.hold(num_bytes)

    def collect(self, num_bytes: int) -> None:
        """Count bytes of a response that its client gets as a whole.

        Such responses have no limit of their own, since a client cannot read them earlier. Raises
        InvalidRequestError for a response that exceeds the limit of its tenant, and OverloadedError
        beyond a limit; then the bytes are not counted.
        """
        limits = self._bytes.limits
        if self.num_bytes + num_bytes > limits.tenant_bytes:
            raise InvalidRequestError(
                f"The response exceeds {limits.tenant_bytes} bytes (a quarter of "
                "--unread-output-mib). Stream it, or ask for fewer choices, tokens or "
                "log-probabilities."
            )
        scope = self._bytes.full_scope(self._tenant, num_bytes)
        if scope is not None:
            whose = "this tenant" if scope == "tenant" else "all tenants"
            raise OverloadedError(
                f"The server has no memory left for responses to {whose} that are not read yet "
                "(--unread-output-mib). Retry later, or stream the response.",
                retry_after_s=_RETRY_S,
            )
        self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are kept already, regardless of the limits."""
        self.num_bytes += num_bytes
        self._bytes.count(self._tenant, num_bytes)

    def remove(self, num_bytes: int) -> None:
        """Stop counting bytes that are no longer kept."""
        self.hold(-num_bytes)

    def clear(self) -> None:
        """Stop counting all bytes; the buffer may be used again."""
        if self.num_bytes:
            if self._note_freed is not None:
                self._note_freed(self.num_bytes)
            self.remove(self.num_bytes)


class MemoryTrimmer:
    """Trims memory after many large requests and responses. Used from the event loop only.

    It takes tens of milliseconds on a thread, during which others may wait for memory, so it comes
    a second after the last of them, or every five seconds while they continue. The next requests
    use the memory of small requests.
    """

    def __init__(self, *, delay_s: float = _DELAY_S) -> None:
        self._delay_s = delay_s
        self._num_freed_bytes = 0
        """Bytes of large requests and responses since the last trim."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_quiet = True
        """Whether none of them was freed since the timer was started."""
        self._num_delays = 0

    def note_freed(self, num_bytes: int) -> None:
        """Note that a request or a response of this many bytes is freed."""
        if num_bytes < _LARGE_BYTES:
            return
        self._is_quiet = False
        self._num_freed_bytes += num_bytes
        if self._timer is None and self._num_freed_bytes >= _MUCH_BYTES:
            self._num_delays = 0
            self._start_timer()

    def _start_timer(self) -> None:
        self._is_quiet = True
        self._num_delays += 1
        self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._trim_if_quiet)

    def _trim_if_quiet(self) -> None:
        if not self._is_quiet and self._num_delays < _MOST_DELAYS:
            self._start_timer()
            return
        self._timer = None
        self._num_freed_bytes = 0
        # ctypes releases the GIL.
        asyncio.get_running_loop().run_in_executor(None, trim_memory)


def trim_memory() -> None:
    """Return unused memory of the allocator to the system, if it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Intake:
    """The limits of a server on requests that it reads. Used from the event loop only."""

    def __init__(
        self, config: EngineConfig, limits: IntakeLimits, *, note_freed: Callable[[int], None]
    ) -> None:
        """`note_freed` is called with the bytes of each request when it is freed."""
        self.size = request_size(config, limits)
        self.read_timeout_s = limits.read_timeout_s
        self.reception = Reception(limits.received, wait_s=limits.wait_s, note_freed=note_freed)
        self._parser = start_threads(1, name="pagedray-parser")

    async def parse(self, num_bytes: int, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which parses a request of this many bytes.

        Large requests are parsed in one thread, so that the event loop does not wait for them.
        """
        if num_bytes <= _INLINE_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._parser, read)

    def close(self) -> None:
        """End the thread that parses large requests."""
        self._parser.shutdown(wait=False, cancel_futures=True)


class IncomingMessage:
    """The bytes that one request takes until it is parsed. A context manager."""

    __slots__ = ("_reception", "_tenant", "num_bytes")

    def __init__(self, reception: Reception, tenant: str) -> None:
        self._reception = reception
        self._tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises OverloadedError beyond a limit; then they are not counted."""
        if num_bytes:
            self._reception.check_room(self._tenant, num_bytes)
            self._count(num_bytes)

    def reserve(self, num_bytes: int) -> bool:
        """Count more bytes if there is room."""
        has_room = self._reception.has_room(self._tenant, num_bytes)
        if has_room:
            self._count(num_bytes)
        return has_room

    async def wait_room(self, num_bytes: int) -> None:
        """Count more bytes as soon as there is room. Raises OverloadedError if it takes long."""
        await self._reception.wait_room(self._tenant, num_bytes)
        self.num_bytes += num_bytes

    def shrink_to(self, num_bytes: int) -> None:
        """Count only this many bytes if more are counted."""
        if num_bytes < self.num_bytes:
            self._count(num_bytes - self.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._reception.count(self._tenant, num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reception.note_freed(self.num_bytes)
        self.shrink_to(0)


class Reception:
    """The requests that a server is receiving. Used from the event loop only."""

    def __init__(
        self, limits: BufferLimits, *, wait_s: float, note_freed: Callable[[int], None]
    ) -> None:
        """A message waits for room for up to `wait_s`.

        `note_freed` is called with the bytes of each request that is not needed any longer.
        """
        self.note_freed = note_freed
        self._bytes = TenantBytes(limits)
        self._wait_s = wait_s
        self.num_waiting = 0
        """Requests that wait for room."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all requests."""
        return self._bytes.num_bytes

    def open_message(self, tenant: str) -> IncomingMessage:
        """Return the empty message of a tenant's request."""
        return IncomingMessage(self, tenant)

    def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raise OverloadedError if this many more bytes of a tenant exceed a limit."""
        limits = self._bytes.limits
        scope = self._bytes.full_scope(tenant, num_bytes)
        if scope == "tenant":
            raise OverloadedError(
                "The server is receiving other requests of this API key's tenant, which may take "
                f"{limits.tenant_bytes} bytes together (a quarter of --receive-buffer-mib)."
            )
        if scope == "server":
            raise OverloadedError(
                f"The server is receiving other requests, which may take {limits.total_bytes} "
                "bytes together (--receive-buffer-mib)."
            )

    async def wait_room(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a tenant as soon as they fit. Raises OverloadedError if it takes long."""
        until_s = time.monotonic() + self._wait_s
        self.num_waiting += 1
        try:
            while not self.has_room(tenant, num_bytes):
                if time.monotonic() >= until_s:
                    self.check_room(tenant, num_bytes)
                await asyncio.sleep(_POLL_S)
        finally:
            self.num_waiting -= 1
        self.count(tenant, num_bytes)

    def count(self, tenant: str, num_bytes: int) -> None:
        """Add bytes to the counts, or subtract them."""
        self._bytes.count(tenant, num_bytes)

    def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Return whether a tenant may receive this many more bytes."""
        return self._bytes.full_scope(tenant, num_bytes) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """The limits on requests that an operator may set."""

    read_timeout_s: float = 30.0
    """How long the message or body of a request may take to arrive."""
    received: BufferLimits = field(default_factory=BufferLimits)
    """Memory for requests that are being received."""
    wait_s: float = 1.0
    """How long a message waits for room in that memory. Those before it arrive within milliseconds
    if their clients have sent all of them."""
    request_bytes: int | None = None
    """The longest message or body; None derives it from the context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """How large one request may be, before its parts are looked at."""

    num_bytes: int = MAX_REQUEST_BYTES
    """Bytes of a body or message."""
    num_values: int = _MAX_VALUES
    """Values in a JSON body."""
    num_list_values: int = _MAX_VALUES
    """Values in one list, of which token ids are the longest."""
    num_messages: int = _MAX_MESSAGES
    """Messages of a conversation, each of which has at least one token."""
    context: int = _MAX_VALUES
    """The context length, which errors name."""


LARGEST = RequestSize()
"""The limits that no model may exceed."""


def request_size(config: EngineConfig, limits: IntakeLimits) -> RequestSize:
    """Return the limits for a model: by default, all prompts that a call may have fit."""
    context = config.max_model_len
    num_bytes = min(MAX_REQUEST_BYTES, _BASE_BYTES + _BYTES_PER_TOKEN * context * MAX_N)
    num_values = min(_MAX_VALUES, _OTHER_VALUES + context * MAX_N)
    if config.model.pools:
        # Its calls may have more texts than others have prompts.
        num_bytes, num_values = MAX_REQUEST_BYTES, _MAX_VALUES
    return RequestSize(
        num_bytes=num_bytes if limits.request_bytes is None else limits.request_bytes,
        num_values=num_values,
        num_list_values=max(_LIST_VALUES, context),
        num_messages=max(_MIN_MESSAGES, min(_MAX_MESSAGES, context)),
        context=context,
    )


def check_num_messages(num_messages: int, size: RequestSize) -> None:
    """Raise ContextLengthError for more messages than the context has tokens."""
    if num_messages > size.num_messages and size.num_messages < LARGEST.num_messages:
        raise ContextLengthError(
            f"messages may have at most {size.num_messages} entries with a context length of "
            f"{size.context} (--max-model-len), not {num_messages}.",
            param="messages",
        )
