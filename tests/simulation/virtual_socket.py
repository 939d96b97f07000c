"""Connected sockets in virtual time, which deliver bytes late and in pieces."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from tests.simulation.world import World

__all__ = ["VirtualSocket", "connect_sockets"]

_MOST_ACCEPTED = 100
"""Bytes that a socket takes at once."""


class VirtualSocket:
    """One end. What was sent is cut anywhere; its pieces arrive in order."""

    family = socket.AF_UNIX

    def __init__(self, world: World, draws: random.Random, *, delay_s: float) -> None:
        self._world = world
        self._draws = draws
        self._delay_s = delay_s
        self._peer: VirtualSocket | None = None
        self._arrived = bytearray()
        self._last_arrival_s = 0.0
        self._is_ended = False
        """Whether the peer is gone, after what has arrived."""
        self._is_closed = False
        self.on_arrival: Callable[[], None] | None = None

    def setblocking(self, flag: bool) -> None:
        assert not flag

    def fileno(self) -> int:
        return 0

    def send(self, data: bytes | memoryview) -> int:
        """Take some of the bytes. Raises OSError if the peer is gone."""
        peer = self._peer
        assert peer is not None
        if self._is_closed or self._is_ended or peer._is_closed:
            raise BrokenPipeError("The peer is gone.")
        taken = bytes(data[:_MOST_ACCEPTED])
        first = 0
        while first < len(taken):
            size = len(taken)
            if self._draws.random() < 0.3:
                size = self._draws.randint(1, len(taken))
            piece = taken[first : first + size]
            first += size
            self._deliver(lambda piece=piece: peer._arrive(piece))  # type: ignore[misc]
        return len(taken)

    def recv(self, size: int) -> bytes:
        """Return what has arrived; nothing if the peer is gone. Raises BlockingIOError."""
        if self._is_closed:
            raise OSError("The socket is closed.")
        if not self._arrived:
            if self._is_ended:
                return b""
            raise BlockingIOError
        chunk = bytes(self._arrived[:size])
        del self._arrived[:size]
        return chunk

    def close(self) -> None:
        """Close this end; the other reads end-of-file after some of what was sent."""
        peer = self._peer
        assert peer is not None
        self._is_closed = True
        self._world.call_later(self._draws.random() * self._delay_s, peer._end)

    def _deliver(self, arrive: Callable[[], None]) -> None:
        delay_s = self._draws.random() * self._delay_s
        self._last_arrival_s = max(self._last_arrival_s, self._world.now_s() + delay_s)
        self._world.call_at(self._last_arrival_s, arrive)

    def _arrive(self, piece: bytes) -> None:
        # What arrives after the end was cut off.
        if self._is_ended or self._is_closed:
            return
        self._arrived += piece
        if self.on_arrival is not None:
            self.on_arrival()

    def _end(self) -> None:
        self._is_ended = True
        if self.on_arrival is not None and not self._is_closed:
            self.on_arrival()


def connect_sockets(
    world: World, draws: random.Random, *, delay_s: float
) -> tuple[VirtualSocket, VirtualSocket]:
    """Return two ends; bytes take at most `delay_s`, unless earlier ones arrive later."""
    one, other = (VirtualSocket(world, draws, delay_s=delay_s) for _ in range(2))
    one._peer, other._peer = other, one
    return one, other
