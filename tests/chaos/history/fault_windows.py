"""The faults of a history: when each began, was noticed and healed, and what it excuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.history.events import FaultHealed, FaultInjected, FaultSeen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.history.events import Event
    from tests.chaos.history.verdict import Gap

__all__ = ["FaultWindow", "fault_windows"]

_GRACE_S = 2.0
"""What a fault did can reach a client shortly after the server has recovered."""


@dataclass(slots=True, kw_only=True)
class FaultWindow:
    """One fault, or a pair of them."""

    injected: FaultInjected
    seen_s: float = math.inf
    healed_s: float = math.inf

    @property
    def name(self) -> str:
        """The names of the faults."""
        return " + ".join(self.injected.faults)

    def contains(self, at_s: float) -> bool:
        """Whether the fault can be the cause of what happened at this time."""
        return self.injected.at_s <= at_s <= self.healed_s + _GRACE_S

    def overlaps(self, gap: Gap) -> bool:
        """Whether the fault can be the cause of a time without tokens."""
        return gap.begin_s < self.healed_s and gap.end_s > self.injected.at_s


def fault_windows(events: Iterable[Event]) -> list[FaultWindow]:
    """Return the faults among the events, in order."""
    windows: dict[int, FaultWindow] = {}
    for event in events:
        if isinstance(event, FaultInjected):
            windows[event.number] = FaultWindow(injected=event)
        elif isinstance(event, FaultSeen):
            windows[event.number].seen_s = event.at_s
        elif isinstance(event, FaultHealed):
            windows[event.number].healed_s = event.at_s
    return list(windows.values())
