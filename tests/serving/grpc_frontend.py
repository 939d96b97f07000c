"""The gRPC frontend alone, on the test's own event loop, over a fake engine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from grpc_status import rpc_status

from cluster.serving.engine_client import EngineClient
from cluster.serving.inputs import CallOptions
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from google.rpc.status_pb2 import Status

    from cluster.serving.auth import Authenticator
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.tls import CertificateStore

__all__ = ["GrpcFrontend", "grpc_frontend", "status_of_call"]


@dataclass(frozen=True)
class GrpcFrontend:
    """A running server with its servicer and engine."""

    port: int
    servicer: Servicer
    engine: FakeEngine

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def stub(
        self, channel: grpc.aio.Channel
    ) -> Any:  # Any: the generated stub is not async to mypy
        return pagedray_pb2_grpc.GenerationServiceStub(channel)


@asynccontextmanager
async def grpc_frontend(
    tokenizer: Tokenizer,
    *,
    certificates: CertificateStore | None = None,
    authenticator: Authenticator | None = None,
    calls: CallOptions | None = None,
) -> AsyncIterator[GrpcFrontend]:
    """Serve within the context."""
    client = EngineClient(asyncio.get_running_loop())
    engine = FakeEngine(client, lambda request, index: [72, 73])
    client.attach_engine(engine)
    servicer = Servicer(
        client, tokenizer, engine_config(), calls or CallOptions(), authenticator=authenticator
    )
    server = GrpcServer(servicer, host="127.0.0.1", port=0, certificates=certificates)
    await server.start_server()
    servicer.set_ready()
    await server.set_serving(True)
    try:
        yield GrpcFrontend(server.port, servicer, engine)
    finally:
        await server.stop_server(0)
        await servicer.close()
        engine.stop()


def status_of_call(error: grpc.RpcError) -> Status:
    """Return the google.rpc.Status in the trailing metadata of a call."""
    assert isinstance(error, grpc.aio.AioRpcError | grpc.Call)
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the stubs are narrower than the library
    assert status is not None
    return status  # type: ignore[no-any-return]  # the library has no types
