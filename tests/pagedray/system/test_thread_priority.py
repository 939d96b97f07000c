"""Threads whose work can wait let others run first."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pagedray.system.thread_priority import let_others_interrupt, lower_priority


def slice_ms() -> float:
    """Return the time slice of the calling thread."""
    try:
        found = re.search(r"se\.slice +: +(\d+)", Path("/proc/thread-self/sched").read_text())
    except FileNotFoundError:
        found = None
    if found is None:
        pytest.skip("This kernel does not show the slices of threads.")
    return int(found[1]) / 1e6


def test_a_thread_that_computes_has_long_slices_and_keeps_its_priority() -> None:
    def lengthened() -> tuple[float, float, int]:
        before_ms = slice_ms()
        let_others_interrupt(threading.get_native_id())
        return before_ms, slice_ms(), os.getpriority(os.PRIO_PROCESS, 0)

    own_ms = slice_ms()
    with ThreadPoolExecutor(1) as thread:
        before_ms, after_ms, niceness = thread.submit(lengthened).result()
    assert niceness == os.getpriority(os.PRIO_PROCESS, 0)
    assert before_ms == own_ms
    if after_ms == before_ms:
        pytest.skip("The slices of this kernel are fixed.")
    assert after_ms > 2 * before_ms
    assert slice_ms() == own_ms


def test_a_priority_is_lowered_at_most_to_the_lowest() -> None:
    def lowered() -> list[int]:
        niceness = []
        for _ in range(3):
            lower_priority(threading.get_native_id(), 8)
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return niceness

    own = os.getpriority(os.PRIO_PROCESS, 0)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(lowered).result() == [min(own + 8 * n, 19) for n in (1, 2, 3)]
