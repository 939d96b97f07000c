"""Limits on the memory of calls: bytes per tenant and in total, unread output, freed memory."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagedray.errors import InvalidRequestError, OverloadedError, UnreadError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "BufferLimits",
    "MemoryTrimmer",
    "OutputBuffer",
    "OutputBuffers",
    "ReaderLimits",
    "TenantBytes",
]

_RETRY_S = 5.0

_DELAY_S = 1.0
_MOST_DELAYS = 5
_LARGE_BYTES = 2**16
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
        self,
        of_all: TenantBytes,
        tenant: str,
        note_freed: Callable[[int], None] | None = None,
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
                "log-probabilities.",
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
