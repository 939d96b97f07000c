"""Keys over gRPC: authentication, and the isolation of tenants."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.serving.auth import Authenticator, digest_of, new_key
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.grpc_frontend import GrpcFrontend, grpc_frontend, status_of_call
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

KEYS = {"red": new_key(), "blue": new_key()}
HEALTH = "grpc.health.v1.Health"


@pytest.fixture
async def frontend(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[GrpcFrontend]:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
            for name, key in KEYS.items()
        )
    )
    async with grpc_frontend(tokenizer, authenticator=Authenticator(path)) as frontend:
        yield frontend


@pytest.fixture
async def channel(frontend: GrpcFrontend) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(frontend.target) as channel:
        yield channel


def _as(name: str) -> Any:  # Any: what every call takes
    return {"metadata": (("authorization", f"Bearer {KEYS[name]}"),)}


async def _methods(channel: grpc.aio.Channel) -> list[str]:
    """Return the path of every method that reflection lists."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([asked]), **_as("red"))]
    paths = []
    for service in answers[0].list_services_response.service:
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service.name)
        call = stub.ServerReflectionInfo(iter([asked]), **_as("red"))
        async for answer in call:
            for content in answer.file_descriptor_response.file_descriptor_proto:
                file = pb.DESCRIPTOR.pool.AddSerializedFile(content)
                for one in file.services_by_name.values():
                    paths += [f"/{one.full_name}/{method.name}" for method in one.methods]
    return sorted(set(paths))


async def _code(channel: grpc.aio.Channel, path: str, **options: Any) -> grpc.StatusCode:
    # Any: the options of a call
    # A client that streams fails with INTERNAL if the call ends before its message is sent.
    call = channel.unary_stream(path)(b"", timeout=60, **options)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    try:
        # An open stream, such as that of Watch, was accepted.
        await anext(aiter(call), None)
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


async def test_nothing_but_health_answers_without_a_key(
    frontend: GrpcFrontend, channel: grpc.aio.Channel
) -> None:
    paths = await _methods(channel)
    assert len(paths) >= 13
    assert "/pagedray.v1.GenerationService/Chat" in paths
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    for path in (*paths, "/pagedray.v1.GenerationService/Nothing", "/nothing/Nothing"):
        is_open = path.startswith(f"/{HEALTH}/")
        assert (await _code(channel, path) is not unauthenticated) is is_open, path
        assert await _code(channel, path, **_as("red")) is not unauthenticated, path
    assert frontend.engine.log.submitted == []


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEYS['red']}", KEYS["red"],
     f"Bearer {KEYS['red']}x", f"Bearer {KEYS['red'][:-1]}"],
)  # fmt: skip
async def test_wrong_key_is_rejected_with_details(
    channel: grpc.aio.Channel, frontend: GrpcFrontend, authorization: str
) -> None:
    call = frontend.stub(channel).Generate(
        pb.GenerateRequest(text="x"), metadata=(("authorization", authorization),)
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    status = status_of_call(caught.value)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("UNAUTHENTICATED", "pagedray")
    assert KEYS["red"] not in status.message


async def test_malformed_message_without_a_key_is_not_parsed(
    channel: grpc.aio.Channel,
) -> None:
    path = "/pagedray.v1.GenerationService/Generate"
    call = channel.unary_stream(path)(b"\xff\xff\xff")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_key(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.ServingStatus.SERVING


async def test_tenants_share_neither_ids_nor_requests(
    frontend: GrpcFrontend, channel: grpc.aio.Channel
) -> None:
    frontend.engine.is_paused = True
    stub = frontend.stub(channel)
    message = pb.GenerateRequest(text="x", request_id="mine")
    calls = {name: stub.Generate(message, **_as(name)) for name in KEYS}
    readers = {name: asyncio.ensure_future(call.read()) for name, call in calls.items()}
    await wait_until(lambda: frontend.engine.num_sequences == 2)
    assert {request.tenant for request in frontend.engine.log.submitted} == {"red", "blue"}
    loads = await stub.GetLoads(pb.GetLoadsRequest(), **_as("red"))
    assert [call.request_id for call in loads.calls] == ["mine"]
    await stub.Abort(pb.AbortRequest(request_ids=["mine"]), **_as("blue"))
    answer = await readers["blue"]
    assert answer.sequences[0].finish_reason == pb.FINISH_REASON_ABORTED
    assert frontend.engine.num_sequences == 1
    assert not readers["red"].done()
    calls["red"].cancel()
    await asyncio.gather(*readers.values(), return_exceptions=True)
    await wait_until(lambda: frontend.engine.num_sequences == 0)
