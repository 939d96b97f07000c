"""Turns of clients whose requests the engine's queue does not limit."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.intake.loop_shares import LoopShares, LoopTimer
from pagedray.errors import OverloadedError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.clock import Clock
from tests.fakes import wait_for
from tests.load.tenant_keys import write_keys
from tests.serving.conftest import Server
from tests.virtual_time import in_virtual_time, pass_time

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def shares(clock: Clock) -> LoopShares:
    return LoopShares(has_streams=lambda: True, clock=clock)


def test_client_waits_until_it_has_had_no_more_than_its_share(
    shares: LoopShares, clock: Clock
) -> None:
    shares.charge("a", 0.12)
    assert shares.wait_s("a") == pytest.approx(0.4)
    clock.now_s += 0.3
    assert shares.wait_s("a") == pytest.approx(0.1)
    clock.now_s += 0.2
    assert shares.wait_s("a") == 0.0


def test_clients_do_not_wait_for_one_another(shares: LoopShares) -> None:
    shares.charge("a", 10.0)
    assert shares.wait_s("b") == 0.0


def test_some_requests_at_once_need_not_wait(shares: LoopShares) -> None:
    for _ in range(50):
        shares.charge("a", 0.0003)
    assert shares.wait_s("a") == 0.0


def test_a_pause_gives_no_credit(shares: LoopShares, clock: Clock) -> None:
    shares.charge("a", 0.001)
    clock.now_s += 3600.0
    shares.charge("a", 0.12)
    assert shares.wait_s("a") == pytest.approx(0.4)


def test_debts_are_bounded(shares: LoopShares, clock: Clock) -> None:
    shares.charge("a", 1000.0)
    assert shares.wait_s("a") == pytest.approx(10.0)
    clock.now_s += 10.0
    assert shares.wait_s("a") == 0.0


def test_nobody_waits_if_nobody_waits_for_tokens(clock: Clock) -> None:
    shares = LoopShares(has_streams=lambda: False, clock=clock)
    shares.charge("a", 10.0)
    assert shares.wait_s("a") == 0.0


def test_debts_are_small_for_what_delayed_nobody(clock: Clock) -> None:
    waiting: list[str] = []
    shares = LoopShares(has_streams=lambda: bool(waiting), clock=clock)
    shares.charge("a", 10.0)
    waiting.append("a")
    assert shares.wait_s("a") == pytest.approx(0.5)
    shares.charge("a", 10.0)
    assert shares.wait_s("a") == pytest.approx(10.0)
    waiting.clear()
    shares.charge("a", 10.0)
    waiting.append("a")
    assert shares.wait_s("a") == pytest.approx(10.0)


def test_accounts_of_clients_that_went_away_are_dropped(shares: LoopShares, clock: Clock) -> None:
    for number in range(3000):
        shares.charge(f"host {number}", 0.0003)
        clock.now_s += 1.0
    assert len(shares._accounts) <= 1024


def test_calls_are_charged_while_another_tenant_waits(clock: Clock) -> None:
    shares = LoopShares(
        has_streams=lambda: True, do_others_wait=lambda tenant: tenant == "busy", clock=clock
    )
    for _ in range(100):
        shares.charge_call("tenant alone", "alone", 0.001)
        shares.charge_call("tenant busy", "busy", 0.001)
    assert shares.wait_s("tenant alone") == 0.0
    assert shares.wait_s("tenant busy") == pytest.approx((0.1 - 0.02) / 0.25)


def test_a_call_counts_once_in_what_requests_take_on_average() -> None:
    shares = LoopShares(has_streams=lambda: True, do_others_wait=lambda _tenant: True)
    for _ in range(100):
        shares.charge_call("tenant a", "a", 0.001, always_s=0.009)
    assert shares._accounts["tenant a"].mean_s == pytest.approx(0.01, rel=0.01)


def test_answers_that_took_long_to_generate_are_charged_as_calls(clock: Clock) -> None:
    shares = LoopShares(has_streams=lambda: True, do_others_wait=lambda _tenant: True, clock=clock)
    for _ in range(20):
        shares.charge_call("tenant a", "a", 3.0)
    assert shares.wait_s("tenant a") == pytest.approx((0.04 - 0.02) / 0.25)


def timed_shares() -> LoopShares:
    """Return shares on the clock of the event loop."""
    return LoopShares(has_streams=lambda: True, clock=asyncio.get_running_loop().time)


@in_virtual_time
async def test_waiting_requests_come_one_after_another() -> None:
    shares = timed_shares()
    shares.charge("a", 0.02 + 0.0025)
    first = asyncio.create_task(shares.wait_turn("a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(shares.wait_turn("a"))
    cancelled = asyncio.create_task(shares.wait_turn("a"))
    await asyncio.sleep(0)
    assert shares.num_waiting("a") == 3
    cancelled.cancel()
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await first
    first_s = loop.time()
    assert first_s - started_s == pytest.approx(0.0025 / 0.25)
    # The second one waits for what the first is expected to take, too.
    await second
    assert loop.time() - first_s >= 0.0003 / 0.25
    assert shares.num_waiting("a") == 0


@in_virtual_time
async def test_request_waits_for_the_debts_of_those_before_it() -> None:
    shares = timed_shares()
    shares.charge("a", 0.02 + 0.0025)
    waiting = asyncio.create_task(shares.wait_turn("a"))
    await asyncio.sleep(0)
    shares.charge("a", 0.1)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    await waiting
    assert loop.time() - started_s == pytest.approx(0.1025 / 0.25)


@in_virtual_time
async def test_nobody_waits_while_the_server_stops() -> None:
    shares = timed_shares()
    shares.charge("a", 10.0)
    waiting = asyncio.create_task(shares.wait_turn("a"))
    await asyncio.sleep(0)
    assert shares.num_waiting("a") == 1
    shares.end_waits()
    started_s = asyncio.get_running_loop().time()
    await waiting
    assert asyncio.get_running_loop().time() == started_s
    assert shares.wait_s("a") == 0.0


@in_virtual_time
async def test_only_the_time_on_the_event_loop_is_measured() -> None:
    async def work() -> str:
        pass_time(0.01)
        await asyncio.sleep(0.5)
        pass_time(0.02)
        return "done"

    timer = LoopTimer(clock=asyncio.get_running_loop().time)
    assert await timer.run(work()) == "done"
    assert timer.used_s == pytest.approx(0.03)


@in_virtual_time
async def test_the_last_time_is_that_since_work_last_waited() -> None:
    async def work() -> None:
        pass_time(0.05)
        await asyncio.sleep(0)
        pass_time(0.01)

    timer = LoopTimer(clock=asyncio.get_running_loop().time)
    await timer.run(work())
    assert timer.last_s == pytest.approx(0.01)
    assert timer.used_s == pytest.approx(0.06)


@in_virtual_time
async def test_the_times_of_failed_and_later_work_add_up() -> None:
    async def work(seconds: float) -> None:
        pass_time(seconds)
        await asyncio.sleep(0.5)
        raise ValueError

    timer = LoopTimer(clock=asyncio.get_running_loop().time)
    for _ in range(2):
        with pytest.raises(ValueError):  # noqa: PT011
            await timer.run(work(0.01))
    assert timer.used_s == pytest.approx(0.02)


async def test_a_timer_measures_real_time() -> None:
    async def work() -> None:
        time.sleep(0.01)

    timer = LoopTimer()
    await timer.run(work())
    assert timer.used_s >= 0.01


async def test_measured_work_can_be_cancelled_and_may_catch_errors() -> None:
    caught: list[BaseException] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError as error:
            caught.append(error)
            raise

    async def timed() -> None:
        await LoopTimer().run(work())

    task = asyncio.create_task(timed())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(caught) == 1


def ask(connection: socket.socket, path: bytes, *, timeout_s: float = 60.0) -> bytes | None:
    """Return the answer to a request; None if there is none in time."""
    connection.settimeout(timeout_s)
    connection.sendall(b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
    received = b""
    try:
        # All answers are JSON objects.
        while not received.endswith(b"}"):
            received += connection.recv(2**16)
    except TimeoutError:
        return None
    return received


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.frontends.http_port), 60)


@contextmanager
def open_stream(server: Server, key: str = "") -> Iterator[None]:
    """Have someone wait for tokens, however long the test takes."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    server.engine.most_tokens = 5
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60):
        wait_for(lambda: server.engine.num_sequences)
        yield


def test_client_that_took_more_waits_but_not_for_its_health_checks(tokenizer: Tokenizer) -> None:
    with Server(tokenizer) as server, connect(server) as one, connect(server) as other:
        shares = server.frontends.servicer.intake.loop_shares
        with open_stream(server):
            server.loop.call_soon_threadsafe(shares.charge, "127.0.0.1", 10.0)
            assert (ask(one, b"/health") or b"").startswith(b"HTTP/1.1 200 ")
            assert ask(one, b"/health", timeout_s=0.2) is None
            assert ask(other, b"/unknown", timeout_s=0.2) is None
            wait_for(lambda: shares.num_waiting("127.0.0.1") == 2)


def test_health_checks_that_never_wait_do_not_delay_other_requests(tokenizer: Tokenizer) -> None:
    with Server(tokenizer) as server, connect(server) as other:
        shares = server.frontends.servicer.intake.loop_shares
        with open_stream(server):
            assert ask(other, b"/unknown") is not None
            wait_for(lambda: "127.0.0.1" in shares._accounts)
            account = shares._accounts["127.0.0.1"]
            charged_at_s = account._changed_s
            for _ in range(3):
                with connect(server) as connection:
                    answer = ask(connection, b"/ready")
                assert (answer or b"").startswith(b"HTTP/1.1 200 ")
            assert account._changed_s == charged_at_s
            assert ask(other, b"/unknown") is not None
            wait_for(lambda: account._changed_s > charged_at_s)


def test_calls_over_grpc_wait_too(tokenizer: Tokenizer) -> None:
    with Server(tokenizer) as server, grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        shares = server.frontends.servicer.intake.loop_shares
        with open_stream(server):
            stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=60.0)
            wait_for(lambda: "127.0.0.1" in shares._accounts)
            server.loop.call_soon_threadsafe(shares.charge, "127.0.0.1", 10.0)
            check = health_pb2.HealthCheckRequest()
            assert health_pb2_grpc.HealthStub(channel).Check(check, timeout=60.0).status == 1
            with pytest.raises(grpc.RpcError) as caught:
                stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_rejected_requests_are_charged(tokenizer: Tokenizer) -> None:
    with Server(tokenizer) as server, connect(server) as connection:
        shares = server.frontends.servicer.intake.loop_shares
        assert (ask(connection, b"/unknown") or b"").startswith(b"HTTP/1.1 404 ")
        wait_for(lambda: "127.0.0.1" in shares._accounts)


def test_rejections_of_an_overloaded_server_are_not_charged(tokenizer: Tokenizer) -> None:
    body = {"model": "tiny", "prompt": "x"}
    with Server(tokenizer) as server, grpc.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        server.engine.rejection = OverloadedError("The queue is full.")
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 429
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(text="x"), timeout=60))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        shares = server.frontends.servicer.intake.loop_shares
        # A call is charged after its client has the status.
        time.sleep(0.1)
        assert not shares._accounts
        server.engine.rejection = None
        with pytest.raises(grpc.RpcError):
            list(stub.Generate(pb.GenerateRequest(text=""), timeout=60))
        wait_for(lambda: "127.0.0.1" in shares._accounts)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_valid_calls_are_charged_while_another_tenant_streams(
    tokenizer: Tokenizer, tmp_path: Path, protocol: str
) -> None:
    keys = write_keys(tmp_path / "keys.toml", "ann", "ben")

    def call(name: str) -> None:
        headers = {"authorization": f"Bearer {keys[name]}"}
        if protocol == "http":
            body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
            url = f"{server.url}/v1/completions"
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        else:
            message = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=1))
            list(stub.Generate(message, metadata=tuple(headers.items()), timeout=60))

    with (
        Server(tokenizer, key_file=tmp_path / "keys.toml") as server,
        grpc.insecure_channel(server.grpc_target) as channel,
    ):
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        shares = server.frontends.servicer.intake.loop_shares
        call("ben")
        time.sleep(0.05)
        assert not shares._accounts
        with open_stream(server, keys["ann"]):
            call("ben")
            wait_for(lambda: "tenant ben" in shares._accounts)


def test_bodies_of_requests_that_wait_are_bounded(tokenizer: Tokenizer) -> None:
    head = b"POST /unknown HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
    with Server(tokenizer) as server, ExitStack() as stack:
        shares = server.frontends.servicer.intake.loop_shares
        stack.enter_context(open_stream(server))
        for _ in range(256):
            # They do not wait for more than ten seconds, unless there is more that they wait for.
            server.loop.call_soon_threadsafe(shares.charge, "127.0.0.1", 10.0)
            stack.enter_context(connect(server)).sendall(head)
        wait_for(lambda: shares.num_waiting("127.0.0.1") == 256)
        connection = stack.enter_context(connect(server))
        connection.sendall(head)
        answer = connection.recv(2**16)
    assert answer.startswith(b"HTTP/1.1 429 ")
    assert b"connection: close" in answer
