"""The HTTP server: its socket, its responses, and its shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.http.kept_response import KeptResponse
from cluster.serving.http.server import HttpConnection, HttpServer
from cluster.serving.http_app import build_http_app
from cluster.serving.intake import BufferLimits, OutputBuffers
from cluster.serving.openai.response_choice import CompleteChoice
from cluster.serving.servicer import Servicer
from tests.serving.conftest import TEXT, engine_config, wait_until, write_tokenizer
from tests.serving.http.raw_requests import post

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Message

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

USER = {"role": "user", "content": "hi"}


def _post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    # Any: JSON
    return http.post(path, json={"model": "tiny", **body})


def test_completion(openai_client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.num_cached_tokens = 2
    num_tokens = len(tokenizer.encode(TEXT, add_special_tokens=False))
    answer = openai_client.completions.create(model="tiny", prompt="hello", max_tokens=num_tokens)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "length", None)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_cached_tokens_count_once_for_each_prompt(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.num_cached_tokens = 2
    prompts = ["hello", "again", "more"]
    answer = openai_client.completions.create(model="tiny", prompt=prompts, max_tokens=9, n=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 54
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


def test_completion_has_16_tokens_by_default(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    openai_client.completions.create(model="tiny", prompt=[5] * 250)
    assert engine.log.submitted[-1].sampling.max_tokens == 6


def test_streamed_completion_equals_the_complete_one(openai_client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 60, "n": 2}
    whole = openai_client.completions.create(**arguments)
    chunks = list(
        openai_client.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {0: "length", 1: "length"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 120
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_prompts_give_choices_in_order(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=9)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    openai_client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=1)
    assert [request.prompt_token_ids for request in engine.log.submitted[-2:]] == [(5, 6), (7,)]


def test_completion_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="x", max_tokens=4, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_chat(openai_client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "h"}]},
            {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},  # type: ignore[typeddict-item]  # a response of the client
            {"role": "user", "content": "i"},
        ],
        stop=" says",
        max_completion_tokens=100,
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The quick brown fox"
    assert choice.finish_reason == "stop"
    assert tokenizer.encode(
        "<s><|system|>be kind</s><|user|>h</s><|assistant|>yes</s><|user|>i</s><|assistant|>",
        add_special_tokens=False,
    ) == list(engine.log.submitted[0].prompt_token_ids)


def test_chat_uses_the_rest_of_the_context_by_default(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.chat.completions.create(model="tiny", messages=[USER])  # type: ignore[list-item]  # a dict
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


def test_streamed_chat(openai_client: openai.OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=60,
            stream=True,
            logprobs=True,
            top_logprobs=1,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("The quick brown fox says h\u00e9llo \u4f60\u597d \U0001f642")
    assert chunks[-1].choices[0].finish_reason == "length"
    logprobs = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert len(logprobs) == 60
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs).decode(errors="replace") == text
    assert logprobs[0].top_logprobs[0].token == logprobs[0].token


def test_extra_parameters_reach_the_engine(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    openai_client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=4,
        temperature=0.5,
        top_p=0.5,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"7": -100},
        user="someone",
        echo=False,
        best_of=1,
        suffix=None,
        extra_body={
            "top_k": 3,
            "min_p": 0.25,
            "repetition_penalty": 1.25,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "min_tokens": 2,
            "priority": 5,
        },
    )
    (request,) = engine.log.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, request.seed) == (0.5, 0.5, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert (dict(sampling.logit_bias), request.priority) == ({7: -100}, 5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.25, 1.25)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((9,), 2, True)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"functions": None, "parallel_tool_calls": True, "store": False, "audio": None},
        {"modalities": ["text"], "service_tier": "auto", "logprobs": None, "stop": None},
        {"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False},
    ],
)
def test_defaults_of_unsupported_parameters_are_accepted(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    answer = _post(http, "/v1/chat/completions", messages=[USER], max_tokens=1, **body)
    assert answer.status_code == 200


def test_client_id_is_echoed_in_the_header(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "x"},
        headers={"x-request-id": "mine-1"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert engine.log.submitted[0].id not in answer.text


async def test_disconnect_of_a_stream_aborts_at_once(server: Server) -> None:
    engine = server.engine
    engine.most_tokens = 1
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
    await wait_until(lambda: engine.num_sequences == 0)
    assert engine.log.aborted == [engine.log.submitted[0].id]


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_before_the_first_token_aborts(server: Server, stream: bool) -> None:
    engine = server.engine
    engine.is_paused = True
    body = {"model": "tiny", "prompt": "x", "stream": stream}
    async with httpx.AsyncClient(base_url=server.url) as client:
        posting = asyncio.create_task(client.post("/v1/completions", json=body))
        await wait_until(lambda: engine.num_sequences == 1)
        posting.cancel()
        await asyncio.wait([posting])
    await wait_until(lambda: engine.num_sequences == 0)
    assert len(engine.log.aborted) == 1


def test_models(openai_client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").id == "tiny"
    assert http.get("/v1/models/other").status_code == 404


def test_unknown_model_is_not_found(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        openai_client.completions.create(model="other", prompt="x")
    assert engine.log.submitted == []


def test_health_and_metrics(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    _post(http, prompt="x", max_tokens=5)
    _post(http, prompt="", max_tokens=5)
    text = http.get("/metrics").text
    for line in (
        "pagedray_healthy 1.0",
        'pagedray_blocks{pool="device"} 64.0',
        'pagedray_free_blocks{pool="cpu"} 32.0',
        'pagedray_sequences{state="swapped"} 0.0',
        'pagedray_preemptions_total{kind="recompute"} 2.0',
        'pagedray_attention_layers{part="decode",provider="native"} 3.0',
        'pagedray_attention_layers{part="decode",provider="torch"} 1.0',
        'pagedray_replaced_kernels{kernel="skinny"} 1.0',
        "pagedray_generated_tokens_total 50.0",
    ):
        assert line in text
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert f"pagedray_{name}_seconds_count" in text
    for outcome in ("length", "invalid"):
        assert re.search(rf'pagedray_requests_total{{frontend="\w+",outcome="{outcome}"}} ', text)


def test_every_event_is_one_line_of_json(http: httpx.Client) -> None:
    answer = _post(http, prompt="x", max_tokens=5, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"


def make_server(tokenizer: Tokenizer, read_timeout_s: float) -> HttpServer:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    app = build_http_app(servicer, read_timeout_s=read_timeout_s)
    return HttpServer(app, host="127.0.0.1", port=0)


@pytest.fixture
async def impatient_server(tokenizer: Tokenizer) -> HttpServer:
    """A server on the event loop of the test, which waits 0.2 s for requests."""
    return make_server(tokenizer, 0.2)


@pytest.fixture
async def patient_server(tokenizer: Tokenizer) -> HttpServer:
    """A server on the event loop of the test."""
    return make_server(tokenizer, 60.0)


async def test_missing_body_times_out(impatient_server: HttpServer) -> None:
    await impatient_server.start_server()
    # The head arrives before the server knows of the connection, so that it is never late.
    connection = socket.create_connection(("127.0.0.1", impatient_server.port))
    connection.sendall(post(b'{"model"', num_declared=100))
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(60.0):
        received = await reader.read()
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"type":"invalid_request_error"' in received
    writer.close()
    await impatient_server.stop_server()


async def test_body_of_a_request_that_was_answered_is_not_kept(patient_server: HttpServer) -> None:
    await patient_server.start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    begun = post(b"x" * 50_000, num_declared=60_000).replace(b"/v1/completions", b"/unknown")
    writer.write(begun)
    assert (await reader.readline()).startswith(b"HTTP/1.1 404 ")
    assert only_connection(patient_server).cycle.body == b""
    writer.close()
    await patient_server.stop_server()


def only_connection(server: HttpServer) -> HttpConnection:
    """Return the server's end of its only connection."""
    assert server._server is not None
    (connection,) = server._server.server_state.connections
    assert isinstance(connection, HttpConnection)
    return connection


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHo"])
async def test_missing_head_times_out(impatient_server: HttpServer, begun: bytes) -> None:
    await impatient_server.start_server()
    connection = socket.create_connection(("127.0.0.1", impatient_server.port))
    connection.sendall(begun)
    reader, writer = await asyncio.open_connection(sock=connection)
    async with asyncio.timeout(60.0):
        assert await reader.read() == b""
    writer.close()
    await impatient_server.stop_server()


async def test_missing_second_head_times_out(patient_server: HttpServer) -> None:
    await patient_server.start_server()
    reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"]}")
    kind = type(only_connection(patient_server))
    kind.options = replace(kind.options, read_timeout_s=0.2)
    writer.write(b"GET /he")
    async with asyncio.timeout(60.0):
        assert await reader.read() == b""
    writer.close()
    await patient_server.stop_server()


async def test_stop_during_a_body_is_quiet_and_quick(
    patient_server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await patient_server.start_server()
    _, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
    writer.write(post(b'{"model"', num_declared=100))
    await asyncio.sleep(0.05)
    # The server would wait a minute for the body.
    async with asyncio.timeout(30.0):
        await patient_server.stop_server()
    writer.close()
    assert [record.getMessage() for record in caplog.records] == []


async def test_connections_made_while_the_server_stops_do_not_hold_it_up(
    tokenizer: Tokenizer,
) -> None:
    client = EngineClient(asyncio.get_running_loop())
    servicer = Servicer(client, tokenizer, engine_config())
    server = HttpServer(build_http_app(servicer), host="127.0.0.1", port=0)
    await server.start_server()
    running = server._server
    assert running is not None
    make: Any = running.config.http_protocol_class  # Any: typed as a protocol of any kind
    ends: list[socket.socket] = []

    async def keep_connecting() -> None:
        # What was accepted before the stop may be connected at any time after it.
        listener = socket.create_server(("127.0.0.1", 0))
        with listener:
            while True:
                ends.append(socket.create_connection(listener.getsockname()))
                theirs, _ = listener.accept()
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: make(
                        config=running.config, server_state=running.server_state, app_state={}
                    ),
                    theirs,
                )
                await asyncio.sleep(0.005)

    connecting = asyncio.create_task(keep_connecting())
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(server.stop_server())
    # Longer than the grace period, after which connections are aborted.
    await asyncio.sleep(1.5)
    connecting.cancel()
    await asyncio.wait_for(stopping, 60.0)
    for end in ends:
        end.close()


async def test_invalid_requests_are_logged_in_one_line(
    patient_server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    await patient_server.start_server()
    for _ in range(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", patient_server.port)
        writer.write(b"GET / HTTP\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()
    await patient_server.stop_server()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["Requests that are not valid HTTP: 1, the last one from 127.0.0.1."]


async def aborted(http: httpx.Client, engine: FakeEngine, **body: Any) -> Any:  # Any: JSON
    """Return the response to a completion that is aborted before its first token."""
    engine.is_paused = True
    asked = {"model": "tiny", "prompt": "hello you", **body}
    answer = asyncio.create_task(
        asyncio.to_thread(
            http.post, "/v1/completions", json=asked, headers={"x-request-id": "mine"}
        )
    )
    await wait_until(lambda: bool(engine.log.submitted))
    assert http.delete("/v1/streams/mine").status_code == 200
    response = await answer
    assert response.status_code == 200, response.text
    return response.json()


async def test_nothing_is_known_of_the_prompt(http: httpx.Client, engine: FakeEngine) -> None:
    answer = await aborted(http, engine, prompt_logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["prompt_logprobs"] == [None] * len(choice["prompt_token_ids"])


async def test_an_echoed_prompt_has_no_logprobs(http: httpx.Client, engine: FakeEngine) -> None:
    answer = await aborted(http, engine, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello you", "abort")
    assert len(choice["logprobs"]["tokens"]) > 1
    assert set(choice["logprobs"]["token_logprobs"]) == {None}


def test_a_choice_without_tokens_is_not_the_best() -> None:
    choices = [CompleteChoice(index=0), CompleteChoice(index=1, sum_logprobs=-9.0, num_tokens=2)]
    assert max(choices, key=CompleteChoice.mean_logprob).index == 1


PARTS = b"x" * 200_000, b"y" * 100_000


@pytest.mark.parametrize(("method", "body"), [("GET", b"".join(PARTS)), ("HEAD", b"")])
async def test_only_get_sends_the_body(method: str, body: bytes) -> None:
    buffers = OutputBuffers(BufferLimits())
    buffer = buffers.open_buffer("tenant")
    buffer.collect(300_000)
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    response = KeptResponse(PARTS, buffer, headers={})
    await response({"type": "http", "method": method}, receive, send)
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == b"300000"
    assert b"".join(one["body"] for one in bodies) == body
    assert [one["more_body"] for one in bodies] == [True] * (len(bodies) - 1) + [False]
    # A client may send its next request once it has the headers of a response to HEAD.
    assert (len(bodies) == 1) == (method == "HEAD")
    assert buffers.num_bytes == 0


PROGRAM = """
import http.client, json, sys
from pathlib import Path
from cluster.serving.text.tokenizer import Tokenizer
from tests.serving.conftest import Server

def post(path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", server.frontends.http_port)
    body = json.dumps({"model": "tiny", **body})
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    answer.read()

with Server(Tokenizer.from_folder(Path(sys.argv[1]))) as server:
    before = set(sys.modules)
    # Long enough that the server looks whether the client has left.
    post("/v1/completions", prompt=[[5] * 200] * 60, max_tokens=2)
    for stream in (False, True):
        post("/v1/completions", prompt="hello", max_tokens=2, stream=stream)
        messages = [{"role": "user", "content": "hello"}]
        for path in ("/v1/chat/completions", "/v1/messages"):
            post(path, messages=messages, max_tokens=2, stream=stream)
        post("/v1/responses", input="hello", max_output_tokens=2, stream=stream)
    print(sorted(set(sys.modules) - before))
"""


def test_requests_import_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM, tmp_path), capture_output=True, text=True, check=False
    )
    assert done.stdout == "[]\n", done.stderr
