"""Limits on the time and memory of one input."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hostile.fuzz.target import Target

__all__ = ["run_within_limits"]

# A hundred times as long as any input takes on a slow machine while branches are counted.
_MAX_CPU_S = 1.0
_MAX_GROWTH_KIB = 128 * 1024
_PROCESS = Path("/proc/self")
_FORGET_PEAK = "5"


def run_within_limits(target: Target, data: bytes) -> None:
    """Run a target; raise AssertionError if it takes more than a second or 128 MiB."""
    # Otherwise, memory below an earlier peak of the process would not be counted.
    (_PROCESS / "clear_refs").write_text(_FORGET_PEAK)
    started_s, peak_kib = time.process_time(), _peak_kib()
    target.run(data)
    taken_s, growth_kib = time.process_time() - started_s, _peak_kib() - peak_kib
    assert taken_s < _MAX_CPU_S, f"The input took {taken_s:.1f} s of CPU time."
    assert growth_kib < _MAX_GROWTH_KIB, f"The input took {growth_kib // 1024} MiB of memory."


def _peak_kib() -> int:
    [found] = re.findall(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
    return int(found)
