"""The limits that frontends apply before and while they read requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

from cluster.serving.buffers import BufferLimits, TenantBytes
from pagedray.errors import ContextLengthError, OverloadedError
from pagedray.machine import start_threads
from pagedray.sampling_params import MAX_N

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pagedray.config import EngineConfig

__all__ = [
    "LARGEST",
    "MAX_REQUEST_BYTES",
    "IncomingMessage",
    "Intake",
    "IntakeLimits",
    "Reception",
    "RequestSize",
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


class Intake:
    """The limits of a server on requests that it reads. Used from the event loop only."""

    def __init__(
        self,
        config: EngineConfig,
        limits: IntakeLimits,
        *,
        note_freed: Callable[[int], None],
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
