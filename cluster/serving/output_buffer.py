"""Accounts of the generated output that the server keeps because clients have not read it.

A buffer only counts bytes, within the limits of its call, of the call's tenant and of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagedray.errors import OverloadedError, UnreadError

if TYPE_CHECKING:
    from cluster.serving.reader_limits import BufferLimits

__all__ = ["OutputBuffer", "OutputBuffers"]

_RETRY_S = 5.0


class OutputBuffer:
    """The bytes that are kept for one call."""

    __slots__ = ("_buffers", "_tenant", "num_bytes")

    def __init__(self, buffers: OutputBuffers, tenant: str) -> None:
        self._buffers = buffers
        self._tenant = tenant
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises UnreadError beyond a limit; then they are not counted."""
        self._buffers.check(self._tenant, self.num_bytes, num_bytes)
        self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Count bytes that are kept already, whatever the limits."""
        self.num_bytes += num_bytes
        self._buffers.count(self._tenant, num_bytes)

    def remove(self, num_bytes: int) -> None:
        """Stop counting bytes that are no longer kept."""
        self.num_bytes -= num_bytes
        self._buffers.count(self._tenant, -num_bytes)

    def clear(self) -> None:
        """Stop counting all bytes; the buffer may be used again."""
        if self.num_bytes:
            self.remove(self.num_bytes)


class OutputBuffers:
    """The buffers of a server. Used from the event loop only."""

    def __init__(self, limits: BufferLimits) -> None:
        self.limits = limits
        self._by_tenant: dict[str, int] = {}
        self.num_bytes = 0
        """Bytes of all buffers."""

    def open_buffer(self, tenant: str) -> OutputBuffer:
        """Return an empty buffer for a call of a tenant."""
        return OutputBuffer(self, tenant)

    def check_room(self, tenant: str) -> None:
        """Raise OverloadedError while the tenant's calls, or all calls, are at their limit.

        A new call starts only if the largest call would have room.
        """
        limits = self.limits
        held = self._by_tenant.get(tenant, 0)
        if held + limits.call_bytes > limits.tenant_bytes:
            raise OverloadedError(
                f"The server keeps {held} bytes of output that clients of this tenant have not "
                "read; read or abort the open streams first.",
                retry_after_s=_RETRY_S,
            )
        if self.num_bytes + limits.call_bytes > limits.total_bytes:
            raise OverloadedError(
                "The server's memory for unread output is in use; retry later.",
                retry_after_s=_RETRY_S,
            )

    def check(self, tenant: str, num_held: int, num_bytes: int) -> None:
        """Raise UnreadError if a call that holds `num_held` bytes may not hold more."""
        limits = self.limits
        if num_held + num_bytes > limits.call_bytes:
            raise UnreadError("call", limits.call_bytes)
        scope = self.full_scope(tenant, num_bytes)
        if scope == "tenant":
            raise UnreadError("tenant", limits.tenant_bytes)
        if scope == "server":
            raise UnreadError("server", limits.total_bytes)

    def full_scope(self, tenant: str, num_bytes: int) -> Literal["tenant", "server"] | None:
        """Return whose limit so many more bytes of a tenant exceed; None if they fit."""
        if self._by_tenant.get(tenant, 0) + num_bytes > self.limits.tenant_bytes:
            return "tenant"
        return "server" if self.num_bytes + num_bytes > self.limits.total_bytes else None

    def count(self, tenant: str, num_bytes: int) -> None:
        """Add bytes to the counts, or subtract them."""
        self.num_bytes += num_bytes
        held = self._by_tenant.get(tenant, 0) + num_bytes
        if held:
            self._by_tenant[tenant] = held
        else:
            self._by_tenant.pop(tenant, None)
