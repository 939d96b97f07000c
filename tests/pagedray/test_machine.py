"""The memory of a container is that of its limit."""

from __future__ import annotations

import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pagedray.machine import (
    available_host_bytes,
    host_memory_bytes,
    let_others_interrupt,
    lower_priority,
    num_usable_cores,
    start_threads,
)
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from types import FrameType

GIB = 2**30
TIMEOUT_S = 60.0


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 9 kB\nMemAvailable:  {GIB // 1024} kB\nBuffers: 1 kB\n")
    return path


def test_available_memory_is_that_of_the_machine_without_a_limit(
    meminfo: Path, tmp_path: Path
) -> None:
    assert available_host_bytes(meminfo, tmp_path / "none") == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == GIB


@pytest.mark.parametrize(("limit", "left"), [(2**20, 2**20 - 5000 + 4096), (4000, 3096), (10, 0)])
def test_a_container_has_what_is_left_of_its_limit(
    meminfo: Path, tmp_path: Path, limit: int, left: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nfile 9999\ninactive_file 4096\n")
    assert host_memory_bytes(tmp_path) == limit
    assert available_host_bytes(meminfo, tmp_path) == left


def test_all_threads_run_work_at_once_while_no_other_can_be_started() -> None:
    running = threading.Barrier(4)

    def work() -> str:
        running.wait(TIMEOUT_S)
        return threading.current_thread().name

    with start_threads(3, name="work") as threads, no_more_threads():
        works = [threads.submit(work) for _ in range(3)]
        running.wait(TIMEOUT_S)
        names = {one.result(TIMEOUT_S) for one in works}
    assert names == {"work_0", "work_1", "work_2"}


def test_every_thread_runs_the_initializer() -> None:
    begun: list[int] = []
    with start_threads(3, name="work", initializer=lambda: begun.append(threading.get_ident())):
        pass
    assert len(set(begun)) == 3


@pytest.mark.parametrize("num_possible", [0, 1, 2])
def test_a_pool_without_its_threads_is_not_made(num_possible: int) -> None:
    begun: list[threading.Thread] = []
    numbers = count()
    with ExitStack() as stack:

        def note_call(frame: FrameType, event: str, _: object) -> None:
            is_start = event == "call" and frame.f_code is threading.Thread.start.__code__
            if is_start and next(numbers) == num_possible:
                stack.enter_context(no_more_threads())

        stack.callback(sys.setprofile, None)
        sys.setprofile(note_call)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start_threads(
                3, name="work", initializer=lambda: begun.append(threading.current_thread())
            )
    for thread in begun:
        thread.join(TIMEOUT_S)
    assert [thread.is_alive() for thread in begun] == [False] * num_possible


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


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("limit", "num_cores"),
    [
        ("300000 100000\n", 3),
        ("150000 100000\n", 1),
        # Less than one core is still a thread.
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("max 100000\n", 8),
        ("", 8),
    ],
)
def test_a_limit_of_the_container_is_that_of_its_threads(
    tmp_path: Path, limit: str, num_cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert num_usable_cores(tmp_path) == num_cores


def test_without_a_group_all_allowed_cores_are_used(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path / "none") == 8
