"""Mutated bodies over both frontends: each is served or gets a well-formed error.

`tests.load.mutated_bodies` sends many more, to a real server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.load.mutated_bodies import mutate_over_grpc, mutate_over_http
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from tests.load.mutated_bodies import Findings
    from tests.serving.conftest import Server

NUM_BODIES = 400


async def check(server: Server, found: Findings, *, served: str, rejected: str) -> None:
    assert found.faults == []
    assert sum(found.statuses.values()) == NUM_BODIES
    # Some mutated bodies stay valid; others break in many ways.
    assert found.statuses[served] > NUM_BODIES // 50
    assert found.statuses[rejected] > NUM_BODIES // 4
    assert len(found.rejections) > 20
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: not async to mypy
        good = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=2))
        messages = [message async for message in stub.Generate(good)]
    assert messages[-1].usage.num_generated_tokens == 2
    await wait_until(lambda: server.engine.num_sequences == 0)


async def test_mutated_messages_are_served_or_rejected(server: Server) -> None:
    server.engine.script = lambda request, index: [72, 1]
    found = await mutate_over_grpc(server.grpc_target, NUM_BODIES, model="tiny")
    await check(server, found, served="OK", rejected="INVALID_ARGUMENT")


async def test_mutated_json_is_served_or_rejected(server: Server) -> None:
    server.engine.script = lambda request, index: [72, 1]
    port = server.frontends.http_port
    assert port is not None
    found = await mutate_over_http(port, NUM_BODIES, model="tiny")
    await check(server, found, served="200", rejected="400")
