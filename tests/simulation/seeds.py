"""Many runs, in other processes too."""

from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

from tests.simulation.run import failure_of
from tests.simulation.scenario import make_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["failing_seeds", "failing_seeds_of"]

_SEEDS_PER_CALL = 50


def failing_seeds(seeds: range, *, num_processes: int) -> Iterator[int]:
    """Yield the seeds whose runs are wrong, in any order."""
    parts = [
        seeds[first : first + _SEEDS_PER_CALL] for first in range(0, len(seeds), _SEEDS_PER_CALL)
    ]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for found in pool.imap_unordered(failing_seeds_of, parts):
            yield from found


def failing_seeds_of(seeds: range) -> list[int]:
    """Return the seeds whose runs are wrong."""
    return [seed for seed in seeds if failure_of(make_scenario(seed))]
