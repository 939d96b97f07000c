"""How long the server waits for clients that do not read, and how much it keeps for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_BUFFER_BYTES", "ReaderLimits"]

DEFAULT_BUFFER_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """The limits on readers of streams."""

    write_timeout_s: float = 60.0
    """How long a client's connection may take to accept one message."""
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Memory for generated output that is kept for clients, of all calls together."""

    @property
    def tenant_buffer_bytes(self) -> int:
        """The part of the memory that the calls of one tenant may use."""
        return self.buffer_bytes // 4

    @property
    def call_buffer_bytes(self) -> int:
        """The part of the memory that one call may use."""
        return self.buffer_bytes // 32
