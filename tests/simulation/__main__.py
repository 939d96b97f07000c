"""Runs many seeds, and prints the smallest scenario of each that fails.

python -m tests.simulation --seeds 1000000
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.run import failing_seeds, failure_of
from tests.simulation.scenario import make_scenario, shrink


def main() -> int:
    """Return 1 if a run is wrong."""
    parser = argparse.ArgumentParser(description="Simulate the engine among faults, by seed.")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    began_s, num_failing = time.monotonic(), 0
    seeds = range(options.first, options.first + options.seeds)
    for seed in failing_seeds(seeds, num_processes=options.processes):
        num_failing += 1
        smallest = shrink(make_scenario(seed), lambda scenario: bool(failure_of(scenario)))
        print(f"Seed {seed} fails: {failure_of(smallest)}\n{smallest}", flush=True)
    seconds = time.monotonic() - began_s
    print(f"{num_failing} of {options.seeds} seeds fail; {seconds:.0f} s.")
    return int(num_failing > 0)


if __name__ == "__main__":
    sys.exit(main())
