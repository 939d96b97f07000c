"""Tenants take turns at the threads of the pool, and none keeps the others waiting."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import pytest

from cluster.structured.fair_thread_pool import FairThreadPool
from pagedray.errors import OverloadedError, ShuttingDownError
from tests.fakes import wait_for
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 60.0


class Tasks:
    """Tasks that end on command, and the order in which they began."""

    def __init__(self) -> None:
        self.threads = FairThreadPool(
            3, max_running=2, max_open=6, max_open_total=9, what="structures"
        )
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def submit(self, tenant: str, *names: str) -> list[Future[str]]:
        return [self._submit(tenant, name) for name in names]

    def _submit(self, tenant: str, name: str) -> Future[str]:
        gate = self._gates[name] = threading.Event()

        def task() -> str:
            self.begun.append(name)
            assert gate.wait(TIMEOUT_S)
            return name

        return self.threads.submit_task(tenant, task)

    def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()


@pytest.fixture
def tasks() -> Iterator[Tasks]:
    tasks = Tasks()
    yield tasks
    tasks.threads.close()
    tasks.end(*tasks._gates)
    tasks.threads.join()


def test_a_tenant_that_fills_its_share_keeps_no_other_waiting(tasks: Tasks) -> None:
    tasks.submit("ann", "a0", "a1", "a2", "a3", "a4", "a5")
    with pytest.raises(OverloadedError, match="6 structures of this tenant are being compiled"):
        tasks.submit("ann", "a6")
    (mine,) = tasks.submit("ben", "b0")
    tasks.end("b0")
    assert mine.result(TIMEOUT_S) == "b0"
    assert set(tasks.begun) == {"a0", "a1", "b0"}


def test_a_free_thread_goes_to_the_tenant_with_the_fewest(tasks: Tasks) -> None:
    tasks.submit("ann", "a0", "a1", "a2", "a3")
    tasks.submit("ben", "b0", "b1")
    tasks.submit("cid", "c0")
    tasks.end("a0")
    wait_for(lambda: len(tasks.begun) == 4)
    # The others have waited longer.
    assert tasks.begun[3] == "c0"
    tasks.end("a1", "b0")
    wait_for(lambda: len(tasks.begun) == 6)
    assert set(tasks.begun[4:]) == {"a2", "b1"}


def test_all_tenants_together_are_limited_as_well(tasks: Tasks) -> None:
    tasks.submit("ann", *(f"a{i}" for i in range(5)))
    tasks.submit("ben", *(f"b{i}" for i in range(4)))
    with pytest.raises(OverloadedError, match="9 structures are being compiled"):
        tasks.submit("cid", "c")


def test_a_task_that_fails_reports_its_error_and_frees_its_thread(tasks: Tasks) -> None:
    def fail() -> None:
        raise ValueError("no")

    failed = [tasks.threads.submit_task("ann", fail) for _ in range(6)]
    wait(failed, TIMEOUT_S)
    assert all(isinstance(one.exception(0.0), ValueError) for one in failed)
    (next_one,) = tasks.submit("ann", "a")
    tasks.end("a")
    assert next_one.result(TIMEOUT_S) == "a"


def test_close_ends_all_futures_without_waiting_for_their_tasks(tasks: Tasks) -> None:
    futures = tasks.submit("ann", "a0", "a1", "a2")
    wait_for(lambda: len(tasks.begun) == 2)
    tasks.threads.close()
    assert all(isinstance(one.exception(0.0), ShuttingDownError) for one in futures)
    with pytest.raises(ShuttingDownError):
        tasks.submit("ben", "b0")
    tasks.end("a0", "a1")
    tasks.threads.join()
    assert set(tasks.begun) == {"a0", "a1"}


def test_tasks_run_while_no_thread_can_be_started(tasks: Tasks) -> None:
    with no_more_threads():
        futures = [*tasks.submit("ann", "a0", "a1"), *tasks.submit("ben", "b0")]
        wait_for(lambda: len(tasks.begun) == 3)
        tasks.end("a0", "a1", "b0")
        assert [one.result(TIMEOUT_S) for one in futures] == ["a0", "a1", "b0"]


def test_a_cancelled_wait_leaves_its_task_running(tasks: Tasks) -> None:
    running, waiting = tasks.submit("ann", "a0", "a1", "a2")[1:]
    assert not running.cancel()
    assert not waiting.cancel()
    tasks.end("a0", "a1", "a2")
    assert [running.result(TIMEOUT_S), waiting.result(TIMEOUT_S)] == ["a1", "a2"]
