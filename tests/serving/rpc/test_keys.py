"""Access over gRPC: keys, TLS, and health checks without a key."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.serving.auth import Authenticator, digest_of, new_key
from cluster.serving.rpc.methods import HEALTH, Health
from cluster.serving.tls import CertificateStore, TlsFiles
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.certificates import Authority, Issued
from tests.serving.conftest import wait_until
from tests.serving.grpc_frontend import GrpcFrontend, grpc_frontend, status_of_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

KEYS = {"red": new_key(), "blue": new_key()}
KEYS_HEALTH = "grpc.health.v1.Health"


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
        is_open = path.startswith(f"/{KEYS_HEALTH}/")
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


AUTHORITY = Authority()
MESSAGE = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=3))
# Otherwise channels of one process share connections.
OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


def _store(folder: Path, *, client_ca: bytes | None = None) -> CertificateStore:
    AUTHORITY.issue().write(folder)
    path = None
    if client_ca is not None:
        path = folder / "ca.crt"
        path.write_bytes(client_ca)
    return CertificateStore(
        TlsFiles(certificate=folder / "tls.crt", key=folder / "tls.key", client_ca=path)
    )


def _channel(
    frontend: GrpcFrontend, authority: Authority = AUTHORITY, client: Issued | None = None
) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        authority.certificate,
        None if client is None else client.key,
        None if client is None else client.certificate,
    )
    return grpc.aio.secure_channel(frontend.target, credentials, OWN_CONNECTION)


async def _ask(frontend: GrpcFrontend, channel: grpc.aio.Channel) -> int:
    async with channel:
        messages = [one async for one in frontend.stub(channel).Generate(MESSAGE, timeout=60)]
    return int(messages[-1].usage.num_generated_tokens)


async def _rejection(frontend: GrpcFrontend, channel: grpc.aio.Channel) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _ask(frontend, channel)
    return caught.value.code()


async def test_client_trusts_the_certificate(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with grpc_frontend(tokenizer, certificates=_store(tmp_path)) as frontend:
        assert await _ask(frontend, _channel(frontend)) == 3
        unavailable = grpc.StatusCode.UNAVAILABLE
        assert await _rejection(frontend, _channel(frontend, Authority("unknown"))) is unavailable
        assert await _rejection(frontend, grpc.aio.insecure_channel(frontend.target)) is unavailable
        assert len(frontend.engine.log.submitted) == 1


async def test_client_must_show_a_certificate(tokenizer: Tokenizer, tmp_path: Path) -> None:
    store = _store(tmp_path, client_ca=AUTHORITY.certificate)
    async with grpc_frontend(tokenizer, certificates=store) as frontend:
        unavailable = grpc.StatusCode.UNAVAILABLE
        assert await _rejection(frontend, _channel(frontend)) is unavailable
        other = Authority("another authority")
        assert await _rejection(frontend, _channel(frontend, client=other.issue())) is unavailable
        assert frontend.engine.log.submitted == []
        assert await _ask(frontend, _channel(frontend, client=AUTHORITY.issue("client"))) == 3
        # The authority is replaced: clients of the old one are rejected.
        (tmp_path / "ca.crt").write_bytes(other.certificate)
        old = _channel(frontend, client=AUTHORITY.issue("client"))
        assert await _rejection(frontend, old) is unavailable
        assert await _ask(frontend, _channel(frontend, client=other.issue("client"))) == 3


async def test_certificates_are_renewed_under_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    next_authority = Authority("the next authority")
    async with grpc_frontend(tokenizer, certificates=_store(tmp_path)) as frontend:
        # A stream that was already open continues on its connection.
        frontend.engine.step_s = 0.002
        kept = _channel(frontend)
        long_call = frontend.stub(kept).Generate(
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=200))
        )
        reader = aiter(long_call)
        await anext(reader)
        for _ in range(5):
            asking = [asyncio.create_task(_ask(frontend, _channel(frontend))) for _ in range(6)]
            AUTHORITY.issue("renewed").write(tmp_path)
            asking += [asyncio.create_task(_ask(frontend, _channel(frontend))) for _ in range(6)]
            assert await asyncio.gather(*asking) == [3] * 12
        next_authority.issue().write(tmp_path)
        assert await _ask(frontend, _channel(frontend, next_authority)) == 3
        assert await _rejection(frontend, _channel(frontend)) is grpc.StatusCode.UNAVAILABLE
        messages = [message async for message in reader]
        assert messages[-1].usage.num_generated_tokens == 200
        await kept.close()  # type: ignore[call-arg]  # grpc-stubs asks for what has a default


async def test_broken_files_keep_the_certificate(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc_frontend(tokenizer, certificates=_store(tmp_path)) as frontend:
        for broken in (b"", AUTHORITY.issue().key):
            (tmp_path / "tls.key").write_bytes(broken)
            assert await _ask(frontend, _channel(frontend)) == 3
        (tmp_path / "tls.crt").unlink()
        assert await _ask(frontend, _channel(frontend)) == 3
        Authority("unknown").issue(num_days=-1).write(tmp_path)
        assert await _ask(frontend, _channel(frontend)) == 3
    assert caplog.text.count("Keeping the TLS certificate in use") >= 4


SERVICE = "some.Service"
STATUS = health_pb2.HealthCheckResponse.ServingStatus


@pytest.fixture
async def health() -> Health:
    return Health((SERVICE,), read_timeout_s=60.0)


@pytest.fixture
async def health_channel(health: Health) -> AsyncIterator[grpc.aio.Channel]:
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
    health: Health, health_channel: grpc.aio.Channel, service: str
) -> None:
    assert await status(call(health_channel, "Check", asking_for(service))) == STATUS.NOT_SERVING
    await health.set_serving(True)
    assert await status(call(health_channel, "Check", asking_for(service))) == STATUS.SERVING


async def test_watch_sends_each_change_once(
    health: Health, health_channel: grpc.aio.Channel
) -> None:
    watch = call(health_channel, "Watch", asking_for(SERVICE))
    assert await status(watch) == STATUS.NOT_SERVING
    await health.set_serving(False)
    await health.set_serving(True)
    assert await status(watch) == STATUS.SERVING
    await health.set_serving(True)
    await health.set_serving(False)
    assert await status(watch) == STATUS.NOT_SERVING
    unknown = call(health_channel, "Watch", asking_for("another"))
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
    health_channel: grpc.aio.Channel,
    method: str,
    body: bytes,
    code: grpc.StatusCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(health_channel, method, body).read()
    assert caught.value.code() is code
    assert not caplog.records


async def test_check_of_an_unknown_service_is_not_found(health_channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(health_channel, "Check", asking_for("another")).read()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_missing_message_times_out(health: Health, health_channel: grpc.aio.Channel) -> None:
    health._read_timeout_s = 0.2
    # No message, and no end of messages either.
    silent: Any = health_channel.stream_stream(f"/{HEALTH}/Check")()  # type: ignore[call-arg]  # Any, ignore: see `call`
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await silent.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_checks_are_answered_beside_all_watches(
    health: Health, health_channel: grpc.aio.Channel
) -> None:
    watches = [call(health_channel, "Watch", asking_for(SERVICE)) for _ in range(512)]
    for watch in watches:
        await status(watch)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(health_channel, "Watch", asking_for("")).read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await status(call(health_channel, "Check", asking_for(""))) == STATUS.NOT_SERVING
    for watch in watches:
        watch.cancel()
    await wait_until(lambda: not health._num_watches)
    assert await status(call(health_channel, "Watch", asking_for(""))) == STATUS.NOT_SERVING
