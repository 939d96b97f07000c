"""The size limit of gRPC messages, the same for both gRPC frontends."""

from __future__ import annotations

from pagedray.errors import InvalidRequestError

__all__ = ["check_message_size", "max_received_bytes"]


def max_received_bytes(max_bytes: int) -> int:
    """Return the size of messages that gRPC receives if they may have `max_bytes`.

    A message between the two limits is received and rejected with error details. gRPC itself
    rejects a longer message by its length, before it is received, without details. A call may hold
    this much memory, so the limit is close to the other limit.
    """
    return max_bytes + max_bytes // 2


def check_message_size(body: bytes, max_bytes: int) -> None:
    """Raise InvalidRequestError for a message that is too large to parse."""
    if len(body) > max_bytes:
        raise InvalidRequestError(
            f"Message of {len(body)} bytes is larger than the limit of {max_bytes} bytes "
            "(--max-request-kib).",
            param="message",
        )
