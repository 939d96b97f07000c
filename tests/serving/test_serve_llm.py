"""The adapter for ray.serve.llm: how it calls our application, and the library if it is there."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.serving.serve_llm import PagedRayLLM, post

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def echo(request: Request) -> Response:
    body = await request.json()
    if not body.get("stream"):
        return JSONResponse({"got": body}, status_code=body.get("status", 200))

    async def events() -> AsyncIterator[bytes]:
        for number in range(3):
            yield f"data: {number}\n\n".encode()

    return StreamingResponse(events(), media_type="text/event-stream")


APP = Starlette(routes=[Route("/echo", echo, methods=["POST"])])


async def test_whole_answers_and_their_status_come_back() -> None:
    body = json.dumps({"status": 429}).encode()
    parts = [part async for part in post(APP, "/echo", body)]
    assert parts == [(429, b'{"got":{"status":429}}')]


async def test_events_come_one_by_one() -> None:
    parts = [part async for part in post(APP, "/echo", b'{"stream": true}')]
    assert parts == [(200, b"data: 0\n\n"), (200, b"data: 1\n\n"), (200, b"data: 2\n\n")]


async def test_whoever_leaves_ends_the_call() -> None:
    ended = asyncio.Event()

    async def endless(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    parts = post(endless, "/", b"{}")
    assert await anext(parts) == (200, b"x")
    await parts.aclose()
    assert ended.is_set()


async def test_a_defect_of_the_application_is_raised() -> None:
    async def broken(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        [part async for part in post(broken, "/", b"{}")]


def test_engine_kwargs_are_our_arguments() -> None:
    config = SimpleNamespace(
        model_loading_config=SimpleNamespace(model_source="/models/tiny"),
        engine_kwargs={"tensor_parallel_size": 2, "device": "cuda"},
    )
    options = PagedRayLLM.get_deployment_options(config)
    rank = {"CPU": 1.0, "GPU": 1.0}
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, rank, rank]
    assert "name" not in options
