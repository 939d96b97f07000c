"""How long the server waits for clients that do not read, and how much it keeps for them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BufferLimits", "ReaderLimits"]


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """Limits of the memory for generated output that is kept for clients."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderLimits:
    """The limits on readers of streams."""

    write_timeout_s: float = 60.0
    """How long a client's connection may take to accept one message."""
    unread_buffer: BufferLimits = BufferLimits()
    """Memory for output that waits for its client to read."""
    resume_grace_s: float | None = None
    """How long a stream without a reader can be resumed; None disables resumable streams."""
    resumes_anonymous: bool = False
    """Whether streams can be resumed if no API keys are required."""
    resume_buffer: BufferLimits = BufferLimits()
    """Memory for the messages of streams that can be resumed."""
