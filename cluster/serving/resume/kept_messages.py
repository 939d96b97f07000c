"""The messages of a resumable stream by number, of which the oldest can be dropped."""

from __future__ import annotations

__all__ = ["KeptMessages", "memory_of"]

_MESSAGE_BYTES = 240
"""Memory of a message without its content: its header, two entries of dictionaries, an integer."""


def memory_of(message: bytes) -> int:
    """Return the bytes that a message takes while it is kept."""
    return len(message) + _MESSAGE_BYTES


class KeptMessages:
    """Messages numbered from 1. All methods but `take` and `clear` take O(1)."""

    def __init__(self) -> None:
        self.first = 1
        """The oldest kept number, or the next number if no message is kept."""
        self.last = 0
        """The last number so far."""
        self._messages: dict[int, bytes] = {}
        self._ends: dict[int, int] = {}
        """Bytes of all messages up to the end of each kept message, dropped messages included."""
        self._num_dropped_bytes = 0

    def append(self, message: bytes) -> None:
        """Keep the next message."""
        end = self._ends.get(self.last, self._num_dropped_bytes) + memory_of(message)
        self.last += 1
        self._messages[self.last] = message
        self._ends[self.last] = end

    def num_bytes_to(self, number: int) -> int:
        """Return the bytes of the messages that are kept up to `number`."""
        return self._ends.get(number, self._num_dropped_bytes) - self._num_dropped_bytes

    def take(self, number: int, num_bytes: int) -> list[bytes]:
        """Return messages after `number`, until they have at least `num_bytes`; they are kept."""
        taken: list[bytes] = []
        while number < self.last and num_bytes > 0:
            number += 1
            taken.append(self._messages[number])
            num_bytes -= memory_of(taken[-1])
        return taken

    def drop_first(self) -> int:
        """Drop the oldest message, and return its bytes."""
        self._num_dropped_bytes = self._ends.pop(self.first)
        message = self._messages.pop(self.first)
        self.first += 1
        return memory_of(message)

    def clear(self) -> None:
        """Drop all messages; no other may follow."""
        self._messages.clear()
        self._ends.clear()
        self.first = self.last + 1
