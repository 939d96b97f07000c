"""Compiles kernels for a Hopper GPU by the launches of a case: all side by side, then each again.

    python -m tests.attention.kernels.hopper.compile_in_parallel CASE [--serially]

Prints a line of JSON: the number of kernels that were compiled side by side, the number of launches
that then did not find theirs in memory, and the hashes of all kernels.
"""

import argparse
import json
import sys
from typing import Any

from tests.attention.kernels.hopper.compile import Compilations, HopperDriver

# isort: split

import triton
from triton.runtime import driver

from attention.kernels.triton.kernel_launcher import ParallelCompilation, fix_kernel_keys


class Misses:
    """Counts the kernels that Triton does not have in memory."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, **_: Any) -> bool:  # Any: Triton has no types
        self.count += 1
        return False


def main() -> int:
    """Compile the kernels of a case twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("case", help="a name in `launches`")
    parser.add_argument("--serially", action="store_true", help="leave out the compilation ahead")
    options = parser.parse_args()
    driver.set_active(HopperDriver())
    fix_kernel_keys()
    from tests.attention.kernels.hopper.launches import LAUNCHES

    launch = LAUNCHES[options.case]
    num_compiled = 0
    if not options.serially:
        with ParallelCompilation(2) as compilation:
            # The driver could launch nothing.
            launch()
            num_compiled = list(compilation.wait())[-1]
    misses = Misses()
    triton.knobs.runtime.jit_cache_hook = misses.note
    compilations = Compilations()
    compilations.install()
    launch()
    print(
        json.dumps(
            {
                "compiled": num_compiled,
                "missing": misses.count,
                "hashes": sorted(one.hash for one in compilations.take().values()),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
