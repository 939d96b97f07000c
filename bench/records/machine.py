"""The machine of a measurement: its description for the results, and free ports."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

__all__ = ["cpu_and_cores", "cpu_name", "free_port"]


def cpu_name() -> str:
    """Return the model of the CPU, or its architecture where Linux reports no model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_and_cores() -> str:
    """Return architecture, model and number of usable cores in one line."""
    return f"{platform.machine()}, {cpu_name()}, {len(os.sched_getaffinity(0))} cores"


def free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
