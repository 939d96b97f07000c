"""Decides from their answers which replicas do not respond. Plain Python with no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["Pulse"]

Replica = TypeVar("Replica")


class Pulse(Generic[Replica]):
    """How long each replica has been silent, in time that passed for this process too."""

    def __init__(self, *, period_s: float, limit_s: float) -> None:
        """`tick` is called every `period_s`; a replica may be silent for `limit_s`."""
        self._period_s = period_s
        self._limit_s = limit_s
        self._silent_s: dict[Replica, float] = {}
        self.silent: frozenset[Replica] = frozenset()
        """Replicas that have not responded for too long; a new set when they change."""

    def note_answer(self, replica: Replica) -> None:
        """Record that a replica has answered."""
        self._silent_s[replica] = 0.0
        if replica in self.silent:
            self.silent -= {replica}

    def tick(self, replicas: Collection[Replica], elapsed_s: float) -> list[Replica]:
        """Let time pass; return the replicas that have just been silent for too long."""
        # If this process was late, it may have been paused, with the replicas.
        counted_s = min(elapsed_s, 2 * self._period_s)
        before = self._silent_s
        self._silent_s = {one: before.get(one, 0.0) + counted_s for one in replicas}
        silent = frozenset(one for one in replicas if self._silent_s[one] > self._limit_s)
        if silent != self.silent:
            self.silent = silent
        return [one for one in silent if before.get(one, 0.0) <= self._limit_s]
