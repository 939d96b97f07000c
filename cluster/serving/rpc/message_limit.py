"""How large a gRPC message may be: one limit, in the same words, over both gRPC frontends."""

from __future__ import annotations

from pagedray.errors import InvalidRequestError

__all__ = ["MAX_MESSAGE_BYTES", "MAX_RECEIVED_BYTES", "check_message_size"]

MAX_MESSAGE_BYTES = 4 * 2**20
MAX_RECEIVED_BYTES = 6 * 2**20
"""Up to here a message is received only to be refused with details.

gRPC refuses a longer one by its length, before it has arrived, in words of its own. So much memory
may a call hold until it is refused; the limit is therefore not far above the other one.
"""


def check_message_size(body: bytes) -> None:
    """Raise InvalidRequestError for a message that is too large, before anything parses it."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"message has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} are allowed.",
            param="message",
        )
