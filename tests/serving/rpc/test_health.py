"""grpc.health.v1, for clients without a key."""

from __future__ import annotations

import logging
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


async def test_checks_are_answered_beside_all_watches(
    health: Health, channel: grpc.aio.Channel
) -> None:
    watches = [call(channel, "Watch", asking_for(SERVICE)) for _ in range(512)]
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
