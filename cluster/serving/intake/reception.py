"""The requests that are being received: their bytes, and who waits for room for them."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from cluster.serving.memory.tenant_bytes import TenantBytes
from pagedray.errors import OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from cluster.serving.memory.tenant_bytes import BufferLimits

__all__ = ["IncomingMessage", "Reception"]


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
        """Count more bytes if there is room and no other message of the tenant waits for it."""
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
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """The sizes that tenants wait for, in the order of the tenants' turns."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all requests."""
        return self._bytes.num_bytes

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return sum(map(len, self._waiting.values()))

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
        if self.has_room(tenant, num_bytes):
            self.count(tenant, num_bytes)
            return
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = num_bytes, given
        self._waiting.setdefault(tenant, deque()).append(entry)
        try:
            async with asyncio.timeout(self._wait_s):
                await given
        except (TimeoutError, asyncio.CancelledError) as error:
            if not given.cancelled():
                self.count(tenant, -num_bytes)
            line = self._waiting.get(tenant, deque())
            with suppress(ValueError):
                line.remove(entry)
            if not line:
                self._waiting.pop(tenant, None)
            # Requests behind it may need less room.
            self._admit_waiting()
            if isinstance(error, TimeoutError):
                self.check_room(tenant, num_bytes)
                text = "The server is receiving other requests (--receive-buffer-mib)."
                raise OverloadedError(text) from None
            raise

    def count(self, tenant: str, num_bytes: int) -> None:
        """Add bytes to the counts, or subtract them."""
        self._bytes.count(tenant, num_bytes)
        if num_bytes < 0 and self._waiting:
            self._admit_waiting()

    def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Return whether a tenant may receive this many more bytes, and none of its calls waits."""
        return tenant not in self._waiting and self._fits(tenant, num_bytes)

    def _fits(self, tenant: str, num_bytes: int) -> bool:
        return self._bytes.full_scope(tenant, num_bytes) is None

    def _admit_waiting(self) -> None:
        """Give room to waiting requests, a request of each tenant in turn."""
        has_admitted = True
        while has_admitted:
            has_admitted = False
            for tenant, line in list(self._waiting.items()):
                num_bytes, given = line[0]
                # A cancelled request has not removed itself yet.
                if not given.cancelled() and not self._fits(tenant, num_bytes):
                    continue
                has_admitted = True
                line.popleft()
                del self._waiting[tenant]
                if line:
                    self._waiting[tenant] = line
                if not given.cancelled():
                    self.count(tenant, num_bytes)
                    given.set_result(None)
