"""How long the server waits for clients that do not read, and how much it keeps for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.serving.memory.tenant_bytes import BufferLimits

__all__ = ["ReaderLimits"]


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
