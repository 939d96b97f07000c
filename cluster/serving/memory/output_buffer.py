"""The generated output that the server keeps because clients have not read it.

A buffer only counts bytes, within the limits of its call, of the call's tenant and of the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.memory.tenant_bytes import TenantBytes
from pagedray.errors import InvalidRequestError, OverloadedError, UnreadError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.memory.tenant_bytes import BufferLimits

__all__ = ["OutputBuffer", "OutputBuffers"]

_RETRY_S = 5.0


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
