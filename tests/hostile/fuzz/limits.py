"""What one input may cost."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hostile.fuzz.target import Target

__all__ = ["run_within_limits"]

# A hundred times what any input takes, on a slow machine and with each branch counted.
_MAX_CPU_S = 1.0
_MAX_GROWTH_KIB = 128 * 1024


def run_within_limits(target: Target, data: bytes) -> None:
    """Run a target; raise AssertionError if it takes more than a second or 128 MiB."""
    started_s, peak_kib = time.process_time(), _peak_kib()
    target.run(data)
    taken_s, growth_kib = time.process_time() - started_s, _peak_kib() - peak_kib
    assert taken_s < _MAX_CPU_S, f"The input took {taken_s:.1f} s of CPU time."
    assert growth_kib < _MAX_GROWTH_KIB, f"The input took {growth_kib // 1024} MiB of memory."


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
