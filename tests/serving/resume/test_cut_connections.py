"""A connection that is cut after any byte of a stream loses nothing that can be resumed."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.resume.cutting_proxy import CuttingProxy, cutting_proxy
from tests.serving.resume.event_client import ask

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.serving.conftest import Server

_WORKERS = 6
BODIES: dict[str, dict[str, Any]] = {  # Any: JSON
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
OPTIONS = {"include_usage": True, "resumable": True}
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
CONNECTION_ERRORS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def cut_everywhere(
    port: int | None, run: Callable[[CuttingProxy, str], Awaitable[object]]
) -> int:
    """Run with connections cut after 0, 1, 2, ... bytes; return how many were cut.

    All must return the same.
    """
    numbers = itertools.count()
    is_cut = True

    async def work(wanted: object) -> None:
        nonlocal is_cut
        async with cutting_proxy(port) as proxy:
            while is_cut:
                num_bytes = next(numbers)
                proxy.cut_next(num_bytes)
                assert await run(proxy, f"cut-{num_bytes}") == wanted
                is_cut &= proxy.has_cut

    async with cutting_proxy(port) as proxy:
        wanted = await run(proxy, "whole")
    await asyncio.gather(*(work(wanted) for _ in range(_WORKERS)))
    return next(numbers) - _WORKERS


def body_of(path: str) -> dict[str, Any]:  # Any: JSON
    return {
        "model": "tiny", "max_tokens": 3, "stream": True, "stream_options": OPTIONS, **BODIES[path]
    }  # fmt: skip


async def resumed_events(proxy: CuttingProxy, server: Server, path: str, name: str) -> list[str]:
    """Return the data of a stream's events, read through the proxy and then without it."""
    found: list[tuple[int, str]] = []
    answer = await ask(proxy.port, "POST", path, body_of(path), x_request_id=name)
    port = server.frontends.http_port
    while True:
        assert answer.status in (0, 200, 204), answer.body
        found += answer.events
        if answer.is_complete:
            break
        answer = await ask(port, "GET", f"/v1/streams/{name}", last_event_id=str(len(found)))
    assert [number for number, _ in found] == list(range(1, len(found) + 1))
    return [data for _, data in found]


def contents(events: list[str]) -> tuple[str, Any, Any]:  # Any: JSON
    """Return the text, the finish reason and the usage that events report."""
    assert events[-1] == "[DONE]"
    *chunks, last = [json.loads(event) for event in events[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices]
    return "".join(texts), choices[-1]["finish_reason"], last["usage"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", pytest.param("/v1/chat/completions", marks=pytest.mark.slow)]
)
async def test_events_of_a_stream_cut_at_every_byte_are_equal(server: Server, path: str) -> None:
    async def run(proxy: CuttingProxy, name: str) -> object:
        return contents(await resumed_events(proxy, server, path, f"{name}-{path[4:]}"))

    assert await cut_everywhere(server.frontends.http_port, run) > 700
    assert server.engine.log.aborted == []


async def resumed_messages(
    proxy: CuttingProxy,
    stub: Any,  # Any: the generated stub is not async to mypy
    name: str,
) -> list[pb.GenerateResponse]:
    """Return the messages of a stream, read through the proxy and then with the stub."""
    sampling = pb.SamplingParams(max_tokens=3)
    first = pb.GenerateRequest(text="x", sampling=sampling, request_id=name, resumable=True)
    found: list[pb.GenerateResponse] = []
    target = f"127.0.0.1:{proxy.port}"
    async with grpc.aio.insecure_channel(target, CHANNEL_OPTIONS) as channel:
        cut: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: as above
        try:
            async for message in cut.Generate(first):
                found.append(message)  # noqa: PERF401  # kept when the stream is cut
        except grpc.aio.AioRpcError as error:
            if error.code() not in CONNECTION_ERRORS:
                raise
            rest = pb.GenerateRequest(request_id=name, resume_from=len(found))
            try:
                found += [message async for message in stub.Generate(rest)]
            except grpc.aio.AioRpcError as missing:
                if found or missing.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
                # The request did not arrive.
                found = [message async for message in stub.Generate(first)]
    assert [message.number for message in found] == list(range(1, len(found) + 1))
    return found


def text_of(messages: list[pb.GenerateResponse]) -> tuple[str, list[int], int]:
    """Return text, tokens and finish reason."""
    sequences = [sequence for message in messages for sequence in message.sequences]
    assert messages[-1].usage.num_generated_tokens == 3
    return (
        "".join(sequence.text for sequence in sequences),
        [token_id for sequence in sequences for token_id in sequence.token_ids],
        sequences[-1].finish_reason,
    )


async def test_messages_of_a_stream_cut_at_every_byte_are_equal(server: Server) -> None:
    async with grpc.aio.insecure_channel(server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)

        async def run(proxy: CuttingProxy, name: str) -> object:
            return text_of(await resumed_messages(proxy, stub, name))

        assert await cut_everywhere(server.frontends.grpc_port, run) > 200
    assert server.engine.log.aborted == []
