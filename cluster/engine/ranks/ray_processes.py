"""The processes of a Ray cluster that this process started.

Some of them, such as Ray's agents, keep running after GCS or the raylet has failed.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray

__all__ = ["RayProcess", "kill_processes", "ray_processes"]

_PROC = Path("/proc")
_STARTED = 19
"""Of the fields of /proc/PID/stat that follow the name."""


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process, identified by more than its number, which the system uses again."""

    pid: int
    started: str
    """In clock ticks since the system started, as /proc writes it."""


def ray_processes() -> frozenset[RayProcess]:
    """Return the daemons of Ray that this process has started, and all their descendants."""
    programs = str(Path(ray.__file__).parent).encode()
    found: set[RayProcess] = set()
    waiting = [pid for pid in _children("self") if programs in _read(pid, "cmdline")]
    while waiting:
        pid = waiting.pop()
        process = _identified(pid)
        if process is not None and process not in found:
            found.add(process)
            waiting += _children(str(pid))
    return frozenset(found)


def kill_processes(processes: frozenset[RayProcess]) -> None:
    """Kill those of the processes that still run."""
    for process in processes:
        if _identified(process.pid) == process:
            with suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)


def _identified(pid: int) -> RayProcess | None:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return RayProcess(pid, fields[_STARTED].decode()) if len(fields) > _STARTED else None


def _children(pid: str) -> list[int]:
    found: list[int] = []
    for children in (_PROC / pid / "task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return (_PROC / str(pid) / name).read_bytes()
    return b""
