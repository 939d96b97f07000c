"""Health checks as an orchestrator sends them: each on a connection of its own."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

__all__ = ["HealthProbe", "Probed"]

_EVERY_S = 0.05
_TIMEOUT_S = 30.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(slots=True)
class Probed:
    """The answers in a period."""

    seconds: list[float] = field(default_factory=list)
    """From connecting to the answer, of both frontends."""
    failed: list[str] = field(default_factory=list)
    """Checks that were not answered with success."""


class HealthProbe:
    """Checks both frontends of a server in turns, without a key."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http_port = http_port
        self._grpc_target = f"127.0.0.1:{grpc_port}"

    async def probe_until(self, ended: asyncio.Event) -> Probed:
        """Check until the event is set, and at least once."""
        found = Probed()
        while True:
            for check in (self._check_http, self._check_grpc):
                started_s = time.perf_counter()
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await check()
                except (OSError, grpc.aio.AioRpcError, AssertionError) as error:
                    found.failed.append(f"{check.__name__}: {error!r:.200}")
                found.seconds.append(time.perf_counter() - started_s)
            if ended.is_set():
                return found
            await asyncio.sleep(_EVERY_S)

    async def _check_http(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            writer.write(_REQUEST)
            answer = await reader.readline()
            assert answer.startswith(b"HTTP/1.1 200"), answer
        finally:
            writer.close()

    async def _check_grpc(self) -> None:
        async with grpc.aio.insecure_channel(self._grpc_target, _OWN_CONNECTION) as channel:
            # Any: the stub is not async to mypy.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer
