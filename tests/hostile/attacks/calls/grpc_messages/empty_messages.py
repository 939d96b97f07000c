"""gRPC messages of empty messages, which take two bytes on the wire and hundreds when parsed."""

from __future__ import annotations

from tests.hostile.floods.call_flood import CallFlood

__all__ = ["EmptyMessages"]

_NUM_MESSAGES = 500_000


class EmptyMessages(CallFlood):
    """A megabyte that parses to a hundred."""

    name = "500000 empty messages"
    method = "Chat"

    def body(self) -> bytes:
        """Return a Chat request, of which field 2 is a message."""
        return b"\x12\x00" * _NUM_MESSAGES
