"""gRPC over TLS: certificates, client certificates, and their renewal under load."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from cluster.serving.tls import CertificateStore, TlsFiles
from pagedray.v1 import pagedray_pb2 as pb
from tests.serving.certificates import Authority, Issued
from tests.serving.grpc_frontend import GrpcFrontend, grpc_frontend

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

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
