"""What the kernel reports about the processes of this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = ["kill_process", "process_status", "start_ticks", "stop_process"]

_START = 19
"""The field of the start in what `process_status` returns."""


def process_status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state letter on. Raises OSError."""
    # The name of the program before, in parentheses, may contain spaces.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """Return when a process started, which distinguishes it from a later one with the same id."""
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
