"""The size limit of gRPC messages, the same for both gRPC frontends."""

from __future__ import annotations

from pagedray.errors import InvalidRequestError

__all__ = ["MAX_MESSAGE_BYTES", "MAX_RECEIVED_BYTES", "check_message_size"]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_RECEIVED_BYTES = 6 * 2**20
"""A message between the two limits is received and rejected with error details.

gRPC itself rejects a longer one by its length, before it is received, without details. A call may
hold this much memory, so the limit is close to the other one.
"""


def check_message_size(body: bytes) -> None:
    """Raise InvalidRequestError for a message that is too large to parse."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"Message of {len(body)} bytes is larger than the limit of {MAX_MESSAGE_BYTES} bytes.",
            param="message",
        )
