"""How many gRPC connections may be open without a valid call, and how much they may have sent.

gRPC keeps about 20 KiB for each connection, and what has arrived of a call's headers until they are
complete.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["UnprovenShare"]

_MAX_PER_HOST = 512
_MAX_BYTES = 2**22
_MAX_BYTES_PER_HOST = 2**21
_MOST_COUNTED = 2**14
"""Bytes of a connection that are counted: gRPC rejects longer headers, and does not keep the
health checks that it has answered."""
_FEW_BYTES = 2**12
"""A connection with fewer is not stopped for the bytes of others."""


class UnprovenShare:
    """The number and the bytes of connections without a valid call, from the oldest on."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._total_bytes = 0

    def admits(self, host: str, num_bytes: int) -> bool:
        """Count a connection that has received this many bytes; return whether there is room."""
        if self._num_open[host] >= _MAX_PER_HOST:
            return False
        counted = min(num_bytes, _MOST_COUNTED)
        has_room = (
            self._num_bytes[host] + counted <= _MAX_BYTES_PER_HOST
            and self._total_bytes + counted <= _MAX_BYTES
        )
        if counted > _FEW_BYTES and not has_room:
            return False
        self._num_open[host] += 1
        self._num_bytes[host] += counted
        self._total_bytes += counted
        return True
