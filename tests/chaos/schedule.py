"""The order in which faults are injected."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

    from tests.chaos.faults.fault import Fault

__all__ = ["applicable", "schedule"]

_PAIRS = 0.25
"""The part of the faults that come in pairs."""


def applicable(
    faults: Sequence[type[Fault]], *, target: str, has_rank_processes: bool, can_fill_disk: bool
) -> list[type[Fault]]:
    """Return the faults that can be injected into a target."""
    return [
        fault
        for fault in faults
        if target in fault.targets
        and (has_rank_processes or not fault.needs_rank_processes)
        and (can_fill_disk or not fault.needs_disk)
    ]


def schedule(
    faults: Sequence[type[Fault]], generator: random.Random
) -> Iterator[tuple[type[Fault], ...]]:
    """Yield single faults and pairs forever; each kind comes once before any comes again."""
    while True:
        waiting = generator.sample(faults, len(faults))
        while waiting:
            first = waiting.pop()
            others = [one for one in faults if one is not first and one.pairs_with_others]
            if first.pairs_with_others and others and generator.random() < _PAIRS:
                yield first, generator.choice(others)
            else:
                yield (first,)
