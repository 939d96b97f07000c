"""Long requests are parsed one at a time, tenants in turn, with pauses."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from typing import TYPE_CHECKING, TypeVar

import httpx
import pytest
from starlette.requests import ClientDisconnect

from cluster.serving.auth.tenant import ANONYMOUS
from cluster.serving.intake.parsing import Parsing
from pagedray.errors import InvalidRequestError
from tests.fakes import wait_for
from tests.serving.conftest import Server
from tests.virtual_time import in_virtual_time, pass_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cluster.serving.intake.steps import Steps
    from cluster.serving.text.tokenizer import Tokenizer

Result = TypeVar("Result")

LONG = 2**20
STEP_S = 0.004


def work(log: list[str], name: str, *, num_steps: int = 1) -> Steps[str]:
    for _ in range(num_steps):
        log.append(name)
        pass_time(STEP_S)
        yield
    return name


def timed_parsing(*, has_streams: bool = True) -> Parsing:
    """Return what parses on the clock of the event loop."""
    clock = asyncio.get_running_loop().time
    return Parsing(has_streams=lambda: has_streams, clock=clock)


@in_virtual_time
async def test_short_requests_do_not_wait() -> None:
    parsing, log = timed_parsing(), list[str]()
    long = asyncio.create_task(parsing.run("ann", LONG, work(log, "long", num_steps=3)))
    await asyncio.sleep(0)
    assert await parsing.run("ann", 100, work(log, "short")) == "short"
    assert await long == "long"
    assert log == ["long", "short", "long", "long"]


@in_virtual_time
async def test_long_requests_of_tenants_take_turns() -> None:
    parsing, log = timed_parsing(), list[str]()
    names = ["ann"] * 4 + ["ben"] * 2
    await asyncio.gather(*(parsing.run(name, LONG, work(log, name)) for name in names))
    assert log[:3] in (["ann", "ben", "ann"], ["ann", "ben", "ben"])
    assert log[-1] == "ann"


@in_virtual_time
async def test_others_run_between_the_steps_of_a_long_request() -> None:
    parsing, log = timed_parsing(), list[str]()
    long = asyncio.create_task(parsing.run("ann", LONG, work(log, "long", num_steps=4)))
    while not long.done():
        log.append("other")
        await asyncio.sleep(0.001)
    places = [place for place, name in enumerate(log) if name == "long"]
    assert len(places) == 4
    assert all("other" in log[one:next_one] for one, next_one in itertools.pairwise(places))


@in_virtual_time
async def test_a_quarter_of_the_time_is_used_while_others_wait_for_tokens() -> None:
    parsing, loop = timed_parsing(), asyncio.get_running_loop()
    started_s = loop.time()
    await parsing.run("ann", 10_000, work([], "long", num_steps=4))
    await parsing.run("ben", 10_000, work([], "next", num_steps=1))
    assert loop.time() - started_s > (5 + 4 * 3) * STEP_S


@in_virtual_time
async def test_nothing_pauses_while_nobody_waits_for_tokens() -> None:
    parsing, log = timed_parsing(has_streams=False), list[str]()
    long = asyncio.create_task(parsing.run("ann", LONG, work(log, "long", num_steps=4)))
    while not long.done():
        log.append("other")
        await asyncio.sleep(0)
    places = [place for place, name in enumerate(log) if name == "long"]
    # A pause of the length of a step would have room for hundreds.
    assert all(2 <= next_one - one < 20 for one, next_one in itertools.pairwise(places))


@in_virtual_time
async def test_an_error_ends_the_turn() -> None:
    parsing, log = timed_parsing(), list[str]()

    def reject() -> Steps[str]:
        yield
        raise InvalidRequestError("bad")

    with pytest.raises(InvalidRequestError):
        await parsing.run("ann", LONG, reject())
    assert await parsing.run("ann", LONG, work(log, "next")) == "next"


@in_virtual_time
async def test_a_request_whose_client_has_left_is_not_read() -> None:
    parsing, log = timed_parsing(has_streams=False), list[str]()

    async def leave() -> None:
        raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        await parsing.run("ann", LONG, work(log, "left"), check_client=leave)
    assert await parsing.run("ann", LONG, work(log, "next")) == "next"
    assert log == ["next"]


def test_bodies_of_clients_that_left_before_their_turn_are_not_read(tokenizer: Tokenizer) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 12_000, "n": -1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Server(tokenizer) as server:
        turns = server.frontends.servicer.intake.parsing._turns
        asyncio.run_coroutine_threadsafe(turns.wait_turn("someone"), server.loop).result(60)
        assert server.frontends._http is not None
        assert server.frontends._http._server is not None
        connections = server.frontends._http._server.server_state.connections
        with socket.create_connection(("127.0.0.1", server.frontends.http_port), 60) as connection:
            connection.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
            wait_for(lambda: turns.num_waiting(ANONYMOUS.name))
        wait_for(lambda: not connections)
        server.loop.call_soon_threadsafe(turns.end_turn, "someone", 0.0)
        wait_for(lambda: not turns.num_tenants)
        invalid = 'outcome="invalid"'
        metrics = server.frontends.servicer.metrics.render().decode()
        assert not [line for line in metrics.splitlines() if invalid in line and "http" in line]


class _Recording(Parsing):
    """Notes the bytes for whose receiving tenants are charged."""

    def __init__(self) -> None:
        super().__init__(has_streams=lambda: False)
        self.num_charged: list[int] = []

    async def run(
        self,
        tenant: str,
        num_bytes: int,
        steps: Steps[Result],
        *,
        check_client: Callable[[], Awaitable[None]] | None = None,
        num_received: int | None = None,
    ) -> Result:
        self.num_charged.append(num_bytes if num_received is None else num_received)
        return await super().run(
            tenant, num_bytes, steps, check_client=check_client, num_received=num_received
        )


def test_a_body_that_needs_a_stored_response_is_received_once(tokenizer: Tokenizer) -> None:
    body = json.dumps({"model": "tiny", "input": "x" * 12_000}).encode()
    headers = {"content-type": "application/json"}
    with Server(tokenizer) as server:
        parsing = server.frontends.servicer.intake.parsing = _Recording()
        httpx.post(f"{server.url}/v1/responses", content=body, headers=headers, timeout=60)
    assert parsing.num_charged == [len(body), 0]


@in_virtual_time
async def test_bytes_that_were_received_before_cause_no_pause() -> None:
    parsing, loop = timed_parsing(), asyncio.get_running_loop()

    def read() -> Steps[None]:
        yield

    started_s = loop.time()
    for _ in range(3):
        # To receive as many would take 30 s.
        await parsing.run("ann", 10**10, read(), num_received=0)
    assert loop.time() == started_s
