"""Finds servers that are ready while nothing moves, in short slots of time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from tests.chaos.history.events import ClientLag, Readiness, Tokens
from tests.chaos.history.verdict import Gap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.history.events import Event

__all__ = ["Movement"]

_SLOT_S = 0.25


class Movement:
    """The slots in which tokens arrived, and those in which the server said that it was ready."""

    def __init__(self) -> None:
        self._moved: set[int] = set()
        self._ready: list[tuple[float, bool]] = []

    def take(self, event: Event) -> None:
        """Note an event; most kinds are ignored."""
        if isinstance(event, Tokens):
            self._note(event.at_s, event.until_s)
        elif isinstance(event, ClientLag):
            # It is unknown what arrived while the clients did not run.
            self._note(event.at_s - event.seconds, event.at_s)
        elif isinstance(event, Readiness):
            self._ready.append((event.at_s, event.state == "ready"))

    def is_ready(self, at_s: float) -> bool:
        """Whether the server said that it was ready at this time."""
        return next((state for since_s, state in reversed(self._ready) if since_s <= at_s), False)

    def standstills(
        self, spans: Sequence[tuple[float, float]], end_s: float, *, at_least_s: float
    ) -> Iterable[Gap]:
        """Yield when calls were open and the server was ready, but no call got a token."""
        still = self._open_slots(spans) & self._ready_slots(end_s) - self._moved
        begin = None
        for slot in range(int(end_s / _SLOT_S) + 2):
            if slot in still:
                begin = slot if begin is None else begin
            elif begin is not None:
                gap = Gap(begin_s=begin * _SLOT_S, end_s=slot * _SLOT_S)
                if gap.end_s - gap.begin_s >= at_least_s:
                    yield gap
                begin = None

    def _note(self, begin_s: float, end_s: float) -> None:
        self._moved.update(range(int(begin_s / _SLOT_S), int(end_s / _SLOT_S) + 1))

    def _ready_slots(self, end_s: float) -> set[int]:
        slots: set[int] = set()
        # The last state holds until the end.
        changes = [*self._ready, (end_s, False)]
        for (since_s, is_ready), (until_s, _) in pairwise(changes):
            if is_ready:
                slots.update(range(int(since_s / _SLOT_S), int(until_s / _SLOT_S) + 1))
        return slots

    @staticmethod
    def _open_slots(spans: Sequence[tuple[float, float]]) -> set[int]:
        slots: set[int] = set()
        for begin_s, end_s in spans:
            slots.update(range(int(begin_s / _SLOT_S) + 1, int(end_s / _SLOT_S)))
        return slots
