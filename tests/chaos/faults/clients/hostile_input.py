"""A tenant sends malformed and hostile requests."""

from __future__ import annotations

import asyncio
import time

import grpc

from tests.chaos.faults.fault import Fault
from tests.load.body_mutator import mutated_json, mutated_protobuf
from tests.load.keep_alive import KeepAlive
from tests.load.request_bodies import json_bodies, protobuf_bodies

__all__ = ["HostileInput"]

_SECONDS = 5.0
_TIMEOUT_S = 10.0


class HostileInput(Fault):
    """Mutated bodies to every endpoint and method."""

    name = "hostile input"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        end_s = time.monotonic() + _SECONDS
        await asyncio.gather(self._over_http(end_s), self._over_grpc(end_s))

    async def _over_http(self, end_s: float) -> None:
        scene = self._scene
        good = json_bodies(scene.target.model)
        port = int(scene.target.url.rpartition(":")[2])
        connection = KeepAlive(port, headers={"authorization": f"Bearer {scene.key}"})
        while time.monotonic() < end_s:
            kind = scene.generator.choice(list(good))
            body = mutated_json(good[kind], scene.generator)
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await connection.post(kind.partition(" ")[0], body)
            except (OSError, EOFError, TimeoutError):
                # The connection has the rest of an answer, or the server restarts.
                connection.close()
        connection.close()

    async def _over_grpc(self, end_s: float) -> None:
        scene = self._scene
        good = protobuf_bodies(scene.target.model)
        metadata = (("authorization", f"Bearer {scene.key}"),)
        async with grpc.aio.insecure_channel(scene.target.grpc_target) as channel:
            while time.monotonic() < end_s:
                kind = scene.generator.choice(list(good))
                method = f"/pagedray.v1.GenerationService/{kind.partition(' ')[0]}"
                body = mutated_protobuf(good[kind], scene.generator)
                call = channel.unary_stream(method)(body, timeout=_TIMEOUT_S, metadata=metadata)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError:
                    continue
