"""The adapter for ray.serve.llm: its calls to our application, and to the library if installed."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import ray
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.serving.ray_serve.llm import LLMAnswers, llm_arguments, post
from cluster.serving.ray_serve.options import MessagePace
from pagedray import PagedRayLLM
from pagedray.errors import StartupError

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


async def test_complete_responses_and_their_status_are_returned() -> None:
    body = json.dumps({"status": 429}).encode()
    parts = [part async for part in post(APP, "/echo", body, {})]
    assert parts == [(429, b'{"got":{"status":429}}')]


async def test_events_come_one_by_one() -> None:
    parts = [part async for part in post(APP, "/echo", b'{"stream": true}', {})]
    assert parts == [(200, b"data: 0\n\n"), (200, b"data: 1\n\n"), (200, b"data: 2\n\n")]


async def test_closing_a_stream_ends_the_call() -> None:
    ended = asyncio.Event()

    async def endless(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    parts = post(endless, "/", b"{}", {})
    assert await anext(parts) == (200, b"x")
    await parts.aclose()
    assert ended.is_set()


async def test_a_defect_of_the_application_is_raised() -> None:
    async def broken(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        raise ClientDisconnect

    with pytest.raises(ClientDisconnect):
        [part async for part in post(broken, "/", b"{}", {})]


async def test_closing_a_stream_before_its_first_part_ends_the_call() -> None:
    sent: list[int] = []

    async def deaf(scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            sent.append(number)

    parts = post(deaf, "/", b"{}", {})
    await anext(parts)
    assert sent == []
    await parts.aclose()
    # The parts are dropped, and the application is not blocked.
    assert sent == [0, 1, 2]


class Numbers:
    """An application that sends parts as fast as they are read, and counts them."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.has_ended = False
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]  # ASGI
        self.headers = dict(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        hanging_up = asyncio.create_task(self._hang_up(receive))
        while not hanging_up.done():
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            self.num_sent += 1
        self.has_ended = True

    async def _hang_up(self, receive) -> None:  # type: ignore[no-untyped-def]  # ASGI
        while (await receive())["type"] != "http.disconnect":
            pass


class LibraryRequest:
    """The pydantic model that the library's ingress passes on."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    @property
    def stream(self) -> object:
        return self._fields.get("stream")

    def model_dump_json(self, *, by_alias: bool, exclude_unset: bool) -> str:
        assert by_alias
        assert exclude_unset
        return json.dumps(self._fields)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the library, which cannot be imported without one of its engines."""
    names = ("ChatCompletionResponse", "CompletionResponse", "ErrorResponse")
    models = {name: lambda name=name, **fields: (name, fields) for name in names}
    monkeypatch.setitem(sys.modules, "ray.serve.llm.openai_api_models", SimpleNamespace(**models))


async def test_a_stream_is_paced_and_waits_for_its_reader() -> None:
    app = Numbers()
    # One message per thousand seconds.
    answers = LLMAnswers(app, MessagePace(1e-3)).chat(LibraryRequest(stream=True), None)
    assert await anext(answers) == "x"
    # Nothing more is read.
    await asyncio.sleep(0.01)
    assert app.num_sent == 0
    waiting = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert app.num_sent == 0
    waiting.cancel()
    await asyncio.wait([waiting])
    assert app.has_ended


async def test_a_closed_stream_has_ended_when_close_returns() -> None:
    app = Numbers()
    pace = MessagePace(1e6)
    answers = LLMAnswers(app, pace).completions(LibraryRequest(stream=True), None)
    for _ in range(3):
        await anext(answers)
    await answers.aclose()
    assert app.has_ended
    # The closed stream does not count.
    with pace.stream() as another:
        assert pace.pause_s(another) == 1e-6


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("call", "kind"), [("chat", "ChatCompletionResponse"), ("completions", "CompletionResponse")]
)
async def test_complete_responses_and_errors_have_the_types_of_the_library(
    call: str, kind: str
) -> None:
    async def answer(request: Request) -> Response:
        if (await request.json()).get("rejected"):
            return JSONResponse({"error": {"message": "no", "type": "t"}}, status_code=429)
        return JSONResponse({"id": request.url.path})

    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[call]
    answers = LLMAnswers(
        Starlette(routes=[Route(path, answer, methods=["POST"])]), MessagePace(1e6)
    )
    ask = getattr(answers, call)
    assert [one async for one in ask(LibraryRequest(), None)] == [(kind, {"id": path})]
    # The library reads the status from the code, also for event streams.
    rejected = ("ErrorResponse", {"error": {"message": "no", "type": "t", "code": 429}})
    for stream in (False, True):
        request = LibraryRequest(rejected=True, stream=stream)
        assert [one async for one in ask(request, None)] == [rejected]


async def test_headers_of_keys_and_traces_are_forwarded_and_those_of_the_body_are_not() -> None:
    app = Numbers()
    given = {"Authorization": "Bearer k", "traceparent": "t", "Content-Length": "7", "Host": "h"}
    answers = LLMAnswers(app, MessagePace(1e6)).chat(
        LibraryRequest(stream=True), SimpleNamespace(headers=given)
    )
    await anext(answers)
    await answers.aclose()
    assert app.headers == {
        b"authorization": b"Bearer k",
        b"traceparent": b"t",
        b"content-type": b"application/json",
        b"content-length": b"16",
    }


def installed(path: str) -> ast.Module:
    """Return a module of the library; Ray installs it even if it cannot be imported."""
    assert ray.__file__ is not None
    return ast.parse((Path(ray.__file__).parent / path).read_text(encoding="utf-8"))


def test_methods_are_those_of_the_librarys_protocol() -> None:
    (protocol,) = (
        node
        for node in installed("llm/_internal/serve/core/protocol.py").body
        if isinstance(node, ast.ClassDef) and node.name == "LLMServerProtocol"
    )
    theirs = {
        node.name: [argument.arg for argument in node.args.args]
        for node in protocol.body
        if isinstance(node, ast.AsyncFunctionDef)
    }
    for name in ("chat", "completions", "check_health", "llm_config"):
        method = getattr(PagedRayLLM, name)
        assert list(inspect.signature(method).parameters) == theirs[name]
        is_stream = inspect.isasyncgenfunction(method)
        assert is_stream or inspect.iscoroutinefunction(method)
        assert is_stream == (name in ("chat", "completions"))


def test_models_are_those_that_the_library_shows() -> None:
    models = {
        node.name
        for node in installed("serve/llm/openai_api_models.py").body
        if isinstance(node, ast.ClassDef)
    }
    assert {"ChatCompletionResponse", "CompletionResponse", "ErrorResponse"} <= models


def test_engine_kwargs_are_our_arguments_or_those_of_vllm() -> None:
    config = SimpleNamespace(
        model_loading_config=SimpleNamespace(model_id="tiny", model_source="/models/tiny"),
        engine_kwargs={
            "tensor_parallel_size": 2,
            "device": "cuda",
            "gpu_memory_utilization": 0.8,
            "dtype": "half",
            "max_replicas": 3,
        },
    )
    options = PagedRayLLM.get_deployment_options(config)
    rank = {"CPU": 1.0, "GPU": 1.0}
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, rank, rank]
    assert "name" not in options
    arguments = llm_arguments(config)
    assert (arguments.model, arguments.serve.served_model_name) == ("/models/tiny", "tiny")
    assert (arguments.engine.memory_fraction, arguments.engine.dtype) == (0.8, "float16")
    assert arguments.serve.max_replicas == 3


def test_a_model_without_a_source_is_found_by_its_id() -> None:
    config = SimpleNamespace(
        model_loading_config=SimpleNamespace(model_id="org/tiny", model_source=None),
        engine_kwargs={},
    )
    assert llm_arguments(config).model == "org/tiny"


def test_an_option_of_vllm_that_we_do_not_have_is_rejected() -> None:
    config = SimpleNamespace(
        model_loading_config=SimpleNamespace(model_id="tiny", model_source="/models/tiny"),
        engine_kwargs={"pipeline_parallel_size": 2},
    )
    with pytest.raises(StartupError, match="pipeline_parallel_size is not supported: use ten"):
        llm_arguments(config)
