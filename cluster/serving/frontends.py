"""The frontends of one replica: gRPC and HTTP over one servicer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from cluster.serving.http.request_checks import AllowedHosts
from cluster.serving.http.server import HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.listener import connection_limits
from cluster.serving.responses.stored_responses import ResponseStore, StoredResponses
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer

if TYPE_CHECKING:
    from cluster.serving.auth import Authenticator
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.frontend_options import FrontendOptions
    from cluster.serving.http.app import HttpApp
    from cluster.serving.telemetry.tracing import Tracer
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.tls import CertificateStore
    from pagedray.config import EngineConfig

__all__ = ["Frontends"]

_HEALTH_POLL_S = 0.25
_CLOSE_GRACE_S = 0.5


class Frontends:
    """Starts and drains the servers of a replica on the running event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        config: EngineConfig,
        options: FrontendOptions,
        *,
        text_pool: TextPool | None = None,
        authenticator: Authenticator | None = None,
        certificates: CertificateStore | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """Without certificates, TLS is disabled."""
        self.servicer = Servicer(
            client,
            tokenizer,
            config,
            options.calls,
            text_pool=text_pool,
            authenticator=authenticator,
            tracer=tracer,
        )
        limits = connection_limits()
        self._grpc = (
            None
            if options.grpc_port is None
            else GrpcServer(
                self.servicer,
                host=options.host,
                port=options.grpc_port,
                certificates=certificates,
                limits=limits,
            )
        )
        self._http = (
            None
            if options.http_port is None
            else HttpServer(
                _http_app(self.servicer, options),
                host=options.host,
                port=options.http_port,
                certificates=certificates,
                limits=limits,
            )
        )
        self._health_task: asyncio.Task[None] | None = None

    @property
    def grpc_port(self) -> int | None:
        """The port of gRPC; None if disabled."""
        return None if self._grpc is None else self._grpc.port

    @property
    def http_port(self) -> int | None:
        """The port of HTTP; None if disabled."""
        return None if self._http is None else self._http.port

    async def start_servers(self) -> None:
        """Bind the ports and serve; requests are rejected until `set_ready`.

        Raises DeviceError if a port is not available; then none is bound.
        """
        try:
            if self._grpc is not None:
                await self._grpc.start_server()
            if self._http is not None:
                await self._http.start_server()
        except BaseException:
            await self._close()
            raise

    async def set_ready(self) -> None:
        """Accept requests, and let gRPC health follow the engine."""
        self.servicer.set_ready()
        if self._grpc is not None:
            is_ready = self.servicer.is_ready
            await self._grpc.set_serving(is_ready)
            self._health_task = asyncio.create_task(self._follow_health(self._grpc, is_ready))

    async def stop_servers(self, grace_s: float) -> None:
        """Report not ready, give running requests `grace_s` to end, then close the ports.

        If cancelled, it may be called again with a shorter grace period.
        """
        self.servicer.stop_accepting()
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
            self._health_task = None
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        await self.servicer.drain(grace_s)
        await self._close()
        await self.servicer.close()

    async def _close(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop_server(_CLOSE_GRACE_S)
        if self._http is not None:
            await self._http.stop_server()

    async def _follow_health(self, server: GrpcServer, was_ready: bool) -> None:
        """Report each change of the readiness that was last reported."""
        while True:
            await asyncio.sleep(_HEALTH_POLL_S)
            is_ready = self.servicer.is_ready
            if is_ready is not was_ready:
                await server.set_serving(is_ready)
                was_ready = is_ready


def _http_app(servicer: Servicer, options: FrontendOptions) -> HttpApp:
    origins, limits = options.allowed_origins, options.store_limits
    return build_http_app(
        servicer,
        allowed_hosts=AllowedHosts(options.allowed_hosts, own_name=options.host, origins=origins),
        allowed_origins=origins,
        store=None if limits is None else ResponseStore(StoredResponses(limits)),
    )
