"""Waiting for the ends of processes that are not children of this one."""

from __future__ import annotations

import time
from collections.abc import Iterable

import psutil

_POLL_S = 0.02


def still_running(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that have not ended after `timeout_s`, as soon as there are none.

    A zombie has ended: it may take the first process of a container seconds to reap it.
    """
    deadline_s = time.monotonic() + timeout_s
    running = list(processes)
    while running := [one for one in running if _runs(one)]:
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    return running


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
