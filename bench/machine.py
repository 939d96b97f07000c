"""The description of the machine in the results of measurements."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpu_and_cores", "cpu_name"]


def cpu_name() -> str:
    """Return the model of the CPU, or its architecture where Linux reports no model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_and_cores() -> str:
    """Return architecture, model and number of usable cores in one line."""
    return f"{platform.machine()}, {cpu_name()}, {len(os.sched_getaffinity(0))} cores"
