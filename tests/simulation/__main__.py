"""Runs many seeds, and prints the smallest scenario of each that fails.

python -m tests.simulation --seeds 1000000
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.simulation.run import failure_of
from tests.simulation.scenario import make_scenario, shrink

_SEEDS_PER_CALL = 50


def main() -> int:
    """Return 1 if a run is wrong."""
    parser = argparse.ArgumentParser(description="Simulate the engine among faults, by seed.")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    began_s, has_failed = time.monotonic(), False
    end = options.first + options.seeds
    parts = [
        range(first, min(first + _SEEDS_PER_CALL, end))
        for first in range(options.first, end, _SEEDS_PER_CALL)
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for seeds in pool.imap_unordered(_failing_seeds, parts):
            for seed in seeds:
                has_failed = True
                _print_failure(seed)
    print(f"{options.seeds} seeds in {time.monotonic() - began_s:.0f} s.")
    return int(has_failed)


def _failing_seeds(seeds: range) -> list[int]:
    return [seed for seed in seeds if failure_of(make_scenario(seed))]


def _print_failure(seed: int) -> None:
    smallest = shrink(make_scenario(seed), lambda scenario: bool(failure_of(scenario)))
    print(f"Seed {seed} fails: {failure_of(smallest)}\n{smallest}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
