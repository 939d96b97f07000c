"""A pool with all its threads works while the system has no more of them."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING

import pytest

from pagedray.system.started_threads import start_threads
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from types import FrameType

TIMEOUT_S = 60.0


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
