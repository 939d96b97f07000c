"""What a process of Ray answers is seen, also while this process has difficulties."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from cluster.engine import ray_health
from cluster.engine.ray_health import RayDaemon
from tests.fakes import wait_for
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ObservedDaemon(RayDaemon):
    """A daemon that is observed once per second of a clock of its own."""

    def __init__(self, port: int) -> None:
        super().__init__("Ray", "127.0.0.1", port)
        self._seconds = count()

    def has_answered(self, number: int) -> bool:
        """Observe it once; return whether it has given so many answers."""
        self.observe(float(next(self._seconds)))
        return self._num_answers >= number


@pytest.fixture
def daemon() -> Iterator[ObservedDaemon]:
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    daemon = ObservedDaemon(port)
    yield daemon
    daemon.close()
    server.stop(None).wait()


class Timeout:
    """A timeout that does something when gRPC adds it to the time at which a call begins."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.num_uses = 0
        self._act = act

    def __radd__(self, now_s: float) -> float:
        self.num_uses += 1
        self._act()
        return now_s + 5.0


def fail() -> None:
    raise ValueError("no timeout")


def call_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "pagedray-ray-calls"]


def test_answers_are_seen_while_no_thread_can_be_started(daemon: ObservedDaemon) -> None:
    wait_for(lambda: daemon.has_answered(1))
    with no_more_threads():
        wait_for(lambda: daemon.has_answered(3))
    assert (daemon.silence_s, daemon.has_ended) == (0.0, False)


def test_calls_that_fail_in_this_process_are_logged_once_and_made_again(
    daemon: ObservedDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_timeout = Timeout(fail)
    wait_for(lambda: daemon.has_answered(1))
    with monkeypatch.context() as patch:
        patch.setattr(ray_health, "_CALL_TIMEOUT_S", no_timeout)
        patch.setattr(ray_health, "_CALL_PERIOD_S", 0.01)
        wait_for(lambda: no_timeout.num_uses >= 3)
    num_answers = daemon._num_answers
    wait_for(lambda: daemon.has_answered(num_answers + 1))
    assert [record.message for record in caplog.records] == [
        "Ray could not be called; trying again."
    ]


def test_calls_end_without_a_log_line_when_the_channel_is_closed(
    daemon: ObservedDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for(lambda: daemon.has_answered(1))
    (thread,) = call_threads()
    monkeypatch.setattr(ray_health, "_CALL_TIMEOUT_S", Timeout(daemon.close))
    thread.join(60.0)
    assert not thread.is_alive()
    assert not caplog.records
