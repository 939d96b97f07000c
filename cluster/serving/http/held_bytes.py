"""The bytes of heads, chunk extensions and trailers that are not complete, which are limited."""

from __future__ import annotations

__all__ = ["MAX_HEAD_BYTES", "HeldBytes", "HeldTotal"]

MAX_HEAD_BYTES = 2**16
"""Limit of a head, and of the chunk extensions and trailers around a body's chunks."""

_MAX_TOTAL_BYTES = 2**24
"""Bytes of all connections together; while they hold more, only short heads are received."""
_SHORT_HEAD_BYTES = 2**12


class HeldTotal:
    """The number of bytes that all connections hold together."""

    def __init__(self) -> None:
        self.num_bytes = 0


class HeldBytes:
    """The bytes that a connection has received since its parser completed a head or a chunk."""

    __slots__ = ("_num_bytes", "_num_counted", "_total")

    def __init__(self, total: HeldTotal) -> None:
        self._total = total
        self._num_bytes = 0
        self._num_counted = 0
        """The bytes of this connection that the total includes."""

    def add(self, num_bytes: int) -> None:
        """Add bytes that the parser is about to be given."""
        self._num_bytes += num_bytes

    def forget(self) -> None:
        """Hold nothing: the parser has completed a head or a chunk with its data."""
        self._num_bytes = 0

    def update_total(self) -> None:
        """Count the bytes in the total, once the parser has handled them."""
        self._total.num_bytes += self._num_bytes - self._num_counted
        self._num_counted = self._num_bytes

    @property
    def is_long(self) -> bool:
        """Whether this connection holds more bytes than a head may have."""
        return self._num_bytes > MAX_HEAD_BYTES

    @property
    def has_no_room(self) -> bool:
        """Whether all connections hold too many bytes for another head."""
        return self._total.num_bytes > _MAX_TOTAL_BYTES and self._num_bytes > _SHORT_HEAD_BYTES
