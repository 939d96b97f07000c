"""grpc.health.v1, for clients without a key."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from cluster.serving.rpc.health import HEALTH, Health
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVICE = "some.Service"
STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture
async def health() -> Health:
    return Health((SERVICE,), read_timeout_s=60.0)


@pytest.fixture
async def channel(health: Health) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


def call(channel: grpc.aio.Channel, method: str, body: bytes) -> Any:  # Any: grpc's call
    return channel.unary_stream(f"/{HEALTH}/{method}")(body)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default


def asking_for(service: str) -> bytes:
    body: bytes = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return body


async def status(one: Any) -> int:  # Any: grpc's call
    return int(health_pb2.HealthCheckResponse.FromString(await one.read()).status)


@pytest.mark.parametrize("service", ["", SERVICE])
async def test_check_returns_the_current_status(
    health: Health, channel: grpc.aio.Channel, service: str
) -> None:
    assert await status(call(channel, "Check", asking_for(service))) == STATUS.NOT_SERVING
    await health.set_serving(True)
    assert await status(call(channel, "Check", asking_for(service))) == STATUS.SERVING


async def test_watch_sends_each_change_once(health: Health, channel: grpc.aio.Channel) -> None:
    watch = call(channel, "Watch", asking_for(SERVICE))
    assert await status(watch) == STATUS.NOT_SERVING
    await health.set_serving(False)
    await health.set_serving(True)
    assert await status(watch) == STATUS.SERVING
    await health.set_serving(True)
    await health.set_serving(False)
    assert await status(watch) == STATUS.NOT_SERVING
    unknown = call(channel, "Watch", asking_for("another"))
    assert await status(unknown) == STATUS.SERVICE_UNKNOWN


@pytest.mark.parametrize("method", ["Check", "Watch"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"\xff" * 50, grpc.StatusCode.INVALID_ARGUMENT),
        (asking_for("x" * 257), grpc.StatusCode.INVALID_ARGUMENT),
        (asking_for("x" * 2**21), grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["no message", "long", "very long"],
)
async def test_malformed_checks_are_rejected_without_a_log_line(
    channel: grpc.aio.Channel,
    method: str,
    body: bytes,
    code: grpc.StatusCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, body).read()
    assert caught.value.code() is code
    assert not caplog.records


async def test_check_of_an_unknown_service_is_not_found(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "Check", asking_for("another")).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_missing_message_times_out(health: Health, channel: grpc.aio.Channel) -> None:
    health._read_timeout_s = 0.2
    # No message, and no end of messages either.
    silent: Any = channel.stream_stream(f"/{HEALTH}/Check")()  # type: ignore[call-arg]  # Any, ignore: see `call`
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await silent.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_checks_are_answered_beside_all_watches_of_a_host(
    health: Health, channel: grpc.aio.Channel
) -> None:
    watches = [call(channel, "Watch", asking_for(SERVICE)) for _ in range(32)]
    for watch in watches:
        await status(watch)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, "Watch", asking_for("")).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await status(call(channel, "Check", asking_for(""))) == STATUS.NOT_SERVING
    for watch in watches:
        watch.cancel()
    await wait_until(lambda: not health._num_watches)
    assert await status(call(channel, "Watch", asking_for(""))) == STATUS.NOT_SERVING


async def test_one_more_call_may_come_when_the_oldest_ones_expire(health: Health) -> None:
    async def wait_for_message() -> None:
        async with asyncio.timeout(0.05) as timeout:
            with health._counted_as_waiting(timeout, "host"):
                await asyncio.sleep(60.0)

    waiting = [asyncio.create_task(wait_for_message()) for _ in range(256)]
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    came = loop.create_future()

    def come() -> None:
        try:
            with health._counted_as_waiting(asyncio.timeout(None), "host"):
                came.set_result(None)
        except RuntimeError as error:
            came.set_exception(error)

    loop.call_later(0.06, come)
    # The event loop is late, so that all of them are due together.
    time.sleep(0.1)
    await came
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(answer, TimeoutError) for answer in answers)


async def test_checks_are_answered_beside_calls_without_a_message() -> None:
    server = grpc.aio.server()
    health = Health((SERVICE,), read_timeout_s=60.0)
    server.add_generic_rpc_handlers((health.handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        # Any: see `call`
        silent: list[Any] = [
            channel.stream_stream(f"/{HEALTH}/Check")()  # type: ignore[call-arg]  # see `call`
            for _ in range(300)
        ]
        await wait_until(lambda: sum(map(len, health._waiting.values())) == 256)
        assert await status(call(channel, "Check", asking_for(""))) == STATUS.NOT_SERVING
        await wait_until(lambda: sum(one.done() for one in silent) >= 300 - 256)
        ended = [await one.code() for one in silent if one.done()]
        assert set(ended) == {grpc.StatusCode.DEADLINE_EXCEEDED}
        for one in silent:
            one.cancel()
    await server.stop(0)
