"""The frontends of one replica: gRPC and HTTP over one servicer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from cluster.serving.connections.connection_limits import connection_limits
from cluster.serving.http.allowed_hosts import AllowedHosts
from cluster.serving.http.server import HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.responses.response_store import ResponseStore
from cluster.serving.responses.stored_responses import StoredResponses
from cluster.serving.rpc.server import GrpcServer
from cluster.serving.servicer import Servicer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.serving.auth.authenticator import Authenticator
    from cluster.serving.connections.tls import CertificateStore
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.http.allowed_origins import AllowedOrigins
    from cluster.serving.intake.limits import IntakeLimits
    from cluster.serving.memory.reader_limits import ReaderLimits
    from cluster.serving.reasoning.formats import ReasoningFormat
    from cluster.serving.responses.stored_responses import StoreLimits
    from cluster.serving.telemetry.tracing import Tracer
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.serving.tools.tool_calls import ToolCallFormat
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
        *,
        host: str,
        grpc_port: int | None,
        http_port: int | None,
        text_pool: TextPool | None = None,
        authenticator: Authenticator | None = None,
        certificates: CertificateStore | None = None,
        tracer: Tracer | None = None,
        tool_format: ToolCallFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        reader_limits: ReaderLimits | None = None,
        allowed_hosts: Iterable[str] = (),
        intake_limits: IntakeLimits | None = None,
        strict_parameters: bool = False,
        allowed_origins: AllowedOrigins | None = None,
        store_limits: StoreLimits | None = None,
    ) -> None:
        """Port 0 lets the system choose; None disables the frontend.

        Without certificates, TLS is disabled. Without keys, HTTP answers for `allowed_hosts`
        besides IP addresses, `localhost` and `host`. `strict_parameters` refuses parameters that
        would be ignored. Web pages of `allowed_origins` may use HTTP from a browser. Responses of
        /v1/responses are not stored if `store_limits` is None.
        """
        self.servicer = Servicer(
            client,
            tokenizer,
            config,
            text_pool=text_pool,
            authenticator=authenticator,
            tracer=tracer,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            reader_limits=reader_limits,
            intake_limits=intake_limits,
            strict_parameters=strict_parameters,
        )
        limits = connection_limits()
        self._grpc = (
            None
            if grpc_port is None
            else GrpcServer(
                self.servicer,
                host=host,
                port=grpc_port,
                certificates=certificates,
                limits=limits,
            )
        )
        self._http = (
            None
            if http_port is None
            else HttpServer(
                build_http_app(
                    self.servicer,
                    allowed_hosts=AllowedHosts(
                        allowed_hosts, own_name=host, origins=allowed_origins
                    ),
                    allowed_origins=allowed_origins,
                    store=(
                        None
                        if store_limits is None
                        else ResponseStore(StoredResponses(store_limits))
                    ),
                ),
                host=host,
                port=http_port,
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
        """Bind the ports and serve; requests are refused until `set_ready`.

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
