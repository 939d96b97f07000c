"""Cores, memory, processes and threads of the machine, or of the container of this process."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "available_host_bytes",
    "child_environment",
    "descriptor_limit",
    "host_memory_bytes",
    "kill_process",
    "leave_removed_folder",
    "let_others_interrupt",
    "lower_priority",
    "num_usable_cores",
    "process_status",
    "raise_descriptor_limit",
    "start_threads",
    "start_ticks",
    "stop_process",
]

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds the limits of its control group."""
_MEMINFO = Path("/proc/meminfo")
_START = 19
"""The field of the start in the result of `process_status`."""
_LOWEST = 19
_SLICE_NS = 20_000_000
"""Longer than the kernel's default, which is at most 3 ms for up to 8 processors."""
_SCHED_SETATTR = {"aarch64": 274, "x86_64": 314}
"""The number of the system call, for which older C libraries have no function."""
# Some programs go through all possible descriptors, so a larger limit is of no use.
_MAX_LIMIT = 2**20


def num_usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the cores on which this process may run, or fewer if its container has a limit.

    Threads beyond a limit make the kernel stop all of them for a part of the time.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        # There is no such group, or its limit is "max".
        return allowed


def host_memory_bytes(cgroup: Path = CGROUP) -> int:
    """Return the bytes of host memory that this machine or container has."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        # There is no such group, or its limit is "max".
        return total


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of host memory that programs may still take here without swapping.

    Memory that the kernel can drop, such as the cached pages of checkpoints, counts as available.
    """
    available = 1024 * _entry(meminfo, "MemAvailable:")
    try:
        used = int((cgroup / "memory.current").read_text())
        left = host_memory_bytes(cgroup) - used + _entry(cgroup / "memory.stat", "inactive_file")
    except (OSError, ValueError):
        return available
    return max(min(available, left), 0)


def _entry(path: Path, name: str) -> int:
    """Return the number after a name in a file of the kernel."""
    for line in path.read_text().splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    raise ValueError(f"{path} has no {name}")


def process_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state letter on. Raises OSError."""
    # The name of the program before, in parentheses, may contain spaces.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Return when a process started, to tell it from a later process with the same id."""
    return int(process_status(pid)[_START])


def kill_process(pid: int, started: int) -> bool:
    """Kill a process in any state; return False if it has ended or another has its id."""
    return _send(signal.SIGKILL, pid, started)


def stop_process(pid: int, started: int) -> bool:
    """Suspend a process; return False if it has ended or another has its id."""
    return _send(signal.SIGSTOP, pid, started)


def _send(number: signal.Signals, pid: int, started: int) -> bool:
    try:
        # The descriptor remains that of the process which is checked here.
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except (FileNotFoundError, ProcessLookupError):
        return False
    finally:
        os.close(descriptor)
    return True


class _Attributes(ctypes.Structure):
    """The arguments of `sched_setattr`, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("niceness", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def lower_priority(thread_id: int, niceness: int) -> None:
    """Give a thread of this process a niceness that much higher, which it cannot lower again.

    `thread_id` is the kernel's, as of `threading.get_native_id`.
    """
    current = os.getpriority(os.PRIO_PROCESS, thread_id)
    os.setpriority(os.PRIO_PROCESS, thread_id, min(current + niceness, _LOWEST))
    let_others_interrupt(thread_id)


def let_others_interrupt(thread_id: int) -> None:
    """Ask the kernel to interrupt a computing thread whenever another thread wakes.

    Since Linux 6.6, a thread that runs may otherwise continue until the next tick, 1 to 10 ms, even
    if its priority is low. From 6.12 on, a thread may request longer time slices, which a waking
    thread with shorter slices interrupts. Child threads inherit the request. Other kernels ignore
    it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or sys.platform != "linux":
        return
    attributes = _Attributes(
        size=ctypes.sizeof(_Attributes),
        policy=os.sched_getscheduler(thread_id),
        niceness=os.getpriority(os.PRIO_PROCESS, thread_id),
        runtime_ns=_SLICE_NS,
    )
    # Without effect where a sandbox does not allow it.
    ctypes.CDLL(None).syscall(number, thread_id, ctypes.byref(attributes), 0)


def leave_removed_folder() -> None:
    """Change to the root folder if the working folder, which a process inherits, was removed.

    Libraries that look for their files, such as oneMKL, otherwise end the process.
    """
    try:
        os.getcwd()  # noqa: PTH109  # as the libraries do
    except FileNotFoundError:
        os.chdir("/")


def child_environment() -> dict[str, str]:
    """Return an environment in which a Python process finds the packages of this process."""
    # They may be found on this process's path without being installed.
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_descriptor_limit() -> None:
    """Raise the limit of this process, and of its children, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start_threads(
    num_threads: int, *, name: str, initializer: Callable[[], object] | None = None
) -> ThreadPoolExecutor:
    """Return a pool with started threads, so that `submit` needs no new thread.

    If an executor cannot start a thread, it keeps the work and may run it much later. Raises
    RuntimeError if the system has no more threads.
    """
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=initializer)
    # A waiting thread is not idle, so the next work gets another thread.
    are_started = threading.Barrier(num_threads)
    try:
        for _ in range(num_threads):
            threads.submit(are_started.wait)
    except RuntimeError:
        are_started.abort()
        threads.shutdown(wait=False, cancel_futures=True)
        raise
    return threads
