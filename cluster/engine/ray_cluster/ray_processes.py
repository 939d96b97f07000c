"""The processes of a Ray cluster that this process started.

Some of them, such as Ray's agents, keep running after GCS or the raylet has failed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from pagedray.system.processes import kill_process, start_ticks, stop_process

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RayProcess", "kill_processes", "kill_ray_processes", "ray_processes"]

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process, identified by more than its number, which the system uses again."""

    pid: int
    start_ticks: int


def ray_processes() -> frozenset[RayProcess]:
    """Return the daemons of Ray that this process has started, and all their descendants."""
    return _found(_pass)


def kill_processes(processes: frozenset[RayProcess]) -> None:
    """Kill those of the processes that still run."""
    for process in processes:
        with suppress(OSError):
            kill_process(process.pid, process.start_ticks)


def kill_ray_processes() -> None:
    """Kill what `ray_processes` returns, also if it starts other processes meanwhile.

    Each is stopped before its children are looked up: one that it started later would not be found
    among the descendants of this process once its parent has been killed.
    """
    kill_processes(_found(_stop))


def _found(visit: Callable[[RayProcess], object]) -> frozenset[RayProcess]:
    """Return what `ray_processes` does; `visit` each process before its children are looked up."""
    programs = str(Path(ray.__file__).parent).encode()
    found: set[RayProcess] = set()
    waiting = [pid for pid in _children("self") if programs in _command_line(pid)]
    while waiting:
        pid = waiting.pop()
        process = _identified(pid)
        if process is not None and process not in found:
            found.add(process)
            visit(process)
            waiting += _children(str(pid))
    return frozenset(found)


def _pass(process: RayProcess) -> None:
    pass


def _stop(process: RayProcess) -> None:
    with suppress(OSError):
        stop_process(process.pid, process.start_ticks)


def _identified(pid: int) -> RayProcess | None:
    try:
        return RayProcess(pid, start_ticks(pid))
    except OSError:
        return None


def _children(pid: str) -> list[int]:
    found: list[int] = []
    for children in (_PROC / pid / "task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_bytes()
    return b""
