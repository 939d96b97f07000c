"""Bodies of requests over HTTP and gRPC, and heads of HTTP/1.1."""

from __future__ import annotations

import asyncio
import atexit
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import uvicorn
from google.protobuf import message as protobuf
from uvicorn.server import ServerState

from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.anthropic.conversation_body import CountBody, MessagesBody, ModelSupport
from cluster.serving.auth import Tenant
from cluster.serving.http.request_checks import MAX_HEAD_BYTES
from cluster.serving.http.server import ConnectionOptions, connection_kind
from cluster.serving.intake import LARGEST
from cluster.serving.json_body import Body, read_body, read_json
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.score_body import EmbeddingBody, RerankBody, ScoreBody
from cluster.serving.ray_serve.http_proxy import ReplicaGuard
from cluster.serving.responses.items import FunctionTools
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from cluster.serving.rpc.call import RpcCall
from cluster.serving.rpc.chat import Chat, read_tokenize
from cluster.serving.rpc.requests import parse, read_embedding, read_generation, read_score
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from pagedray.v1 import pagedray_pb2 as pb
from tests.hostile.fuzz.target import Target
from tests.load.request_bodies import json_bodies, protobuf_bodies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cluster.serving.inputs import GenerationInput

    _Message = MutableMapping[str, Any]  # Any: ASGI's values

AnyBody = TypeVar("AnyBody", bound=Body)

_VARIABLES = frozenset(("enable_thinking", "documents"))
_SUPPORT = ModelSupport(
    known_variables=frozenset(), keeps_system_messages=lambda: False, can_limit_reasoning=True
)


def _read_completion(raw: bytes) -> None:
    _check(_read(CompletionBody, raw).to_input("a"))


def _read_chat(raw: bytes) -> None:
    body = _read(ChatBody, raw)
    tools = body.tool_use("hermes")
    given = body.to_input("a", tools, known_variables=_VARIABLES, note_ignored=_ignore)
    _check(given)


def _read_texts_to_tokenize(raw: bytes) -> None:
    body = _read(TokenizeBody, raw)
    body.to_input(known_variables=lambda _: _VARIABLES, note_ignored=_ignore)


def _read_messages(raw: bytes) -> None:
    body = _read(MessagesBody, raw)
    tools = body.tool_use("hermes")
    _check(body.to_input("a", tools, _SUPPORT, note_ignored=_ignore))


def _read_response(raw: bytes) -> None:
    body = _read(ResponsesBody, raw)
    tools = body.tool_use(FunctionTools(), "hermes")
    given = body.to_input("a", tools, known_variables=frozenset(), note_ignored=_ignore)
    _check(given)


def _read_messages_to_count(raw: bytes) -> None:
    body = _read(CountBody, raw)
    tools = body.tool_use("hermes")
    body.to_input(tools, _SUPPORT, note_ignored=_ignore)


def _read_input_to_count(raw: bytes) -> None:
    body = _read(InputTokensBody, raw)
    tools = body.tool_use(FunctionTools(), "hermes")
    body.to_input(tools, known_variables=frozenset(), note_ignored=_ignore)


_READERS: dict[str, Callable[[bytes], object]] = {
    "/v1/completions": _read_completion,
    "/v1/chat/completions": _read_chat,
    "/v1/embeddings": lambda raw: _read(EmbeddingBody, raw).to_input(),
    "/tokenize": _read_texts_to_tokenize,
    "/detokenize": lambda raw: _read(DetokenizeBody, raw).token_ids(),
    "/rerank": lambda raw: _read(RerankBody, raw).to_input(),
    "/score": lambda raw: _read(ScoreBody, raw).to_input(),
    "/v1/messages": _read_messages,
    "/v1/responses": _read_response,
    "/v1/messages/count_tokens": _read_messages_to_count,
    "/v1/responses/input_tokens": _read_input_to_count,
}
_PATHS = list(_READERS)


def run_openai_bodies(data: bytes) -> None:
    """Read a body for the endpoint that the first byte selects, or raise nothing but rejections."""
    if not data:
        return
    path = _PATHS[data[0] % len(_PATHS)]
    with suppress(InvalidRequestError):
        _READERS[path](data[1:])


def _read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    return read_body(kind, raw, note_ignored=_ignore)


def _ignore(name: str) -> None:
    pass


def _check(given: GenerationInput) -> None:
    """Raise InvalidRequestError for a value of a parameter, as the validator does."""
    SamplingParams(**{"max_tokens": 1, **given.sampling})  # type: ignore[arg-type]  # checked there


def _seed(path: str, body: object) -> bytes:
    """Return what `run` reads as a body for this endpoint."""
    return bytes([_PATHS.index(path)]) + json.dumps(body).encode()


def _message_seeds() -> tuple[bytes, ...]:
    """Return bodies of Anthropic's endpoints."""
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {"a": None}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    counted = {
        "model": "m",
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "y"}]},
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    whole = {**counted, "max_tokens": 2, "stop_sequences": ["zz"], "top_k": 3, "stream": True}
    return _seed("/v1/messages", whole), _seed("/v1/messages/count_tokens", counted)


def _response_seeds() -> tuple[bytes, ...]:
    """Return bodies of OpenAI's Responses API."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    part = {"type": "output_text", "text": "x", "annotations": []}
    said = {"role": "assistant", "content": [part]}
    body = {
        "model": "m",
        "instructions": "x",
        "input": [{"role": "user", "content": "x"}, thought, said, call, output],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 2,
        "stream": True,
    }
    return (_seed("/v1/responses", body),)


def _search_seeds() -> tuple[bytes, ...]:
    """Return bodies that search beams, and that keep their prefixes apart."""
    common = {
        "model": "m",
        "use_beam_search": True,
        "n": 2,
        "length_penalty": 0.8,
        "temperature": 0,
        "cache_salt": "s",
    }
    messages = [{"role": "user", "content": "x"}]
    return (
        _seed("/v1/completions", {**common, "prompt": ["a", "b"]}),
        _seed("/v1/chat/completions", {**common, "messages": messages}),
    )


def _seeds() -> tuple[bytes, ...]:
    return (
        _message_seeds()
        + _response_seeds()
        + _search_seeds()
        + tuple(
            _seed(kind.partition(" ")[0], body)
            for kind, bodies in json_bodies("m").items()
            for body in bodies
        )
    )


OPENAI_BODIES = Target(run=run_openai_bodies, seeds=_seeds())


def run_json_body(data: bytes) -> None:
    """Accept what Python's reader accepts, with the same values, and no name twice."""
    try:
        values = read_json(data)
    except InvalidRequestError:
        return
    expected = json.loads(data.decode(), object_pairs_hook=_object)
    # A text, since a number may be too large for a float.
    assert _is_same(values, expected), (values, expected)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    assert len(dict(pairs)) == len(pairs), f"accepted a duplicate name: {pairs!r:.200}"
    return dict(pairs)


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            _is_same(value[name], other[name]) for name in value
        )
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return type(value) is type(other) and value == other


JSON_BODY = Target(
    run=run_json_body,
    seeds=(
        b'{"model":"m","a":[1,-2.5e3,true,null,{"b":"\\u00e9\\"x\\\\"}],"c":{}}',
        b' {"a" : [ ] , "":"\xc3\xa9","b":[[],[{"a":0.1}]]}\n',
    ),
    words=(
        b"1e999",
        b"-0",
        b"NaN",
        b"Infinity",
        b"\\ud800",
        b'\\"',
        b"\\\\",
        b'"a":',
        b"{}",
        b"[]",
    ),
    max_bytes=1024,
)


_LOOP = asyncio.new_event_loop()
atexit.register(_LOOP.close)


def run_routed_body(data: bytes) -> None:
    """Pass the body on unchanged, whatever it is, and the response back."""
    assert _LOOP.run_until_complete(_statuses(data)) == [400]


async def _statuses(body: bytes) -> list[int]:
    """Return the statuses of the responses to a body."""
    statuses: list[int] = []

    async def replica(scope: Scope, receive: Receive, send: Send) -> None:
        received = await receive()
        assert received["body"] == body
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-length", b"%d" % len(body))],
    }
    await ReplicaGuard(replica)(scope, receive, send)
    return statuses


ROUTED_BODY = Target(
    run=run_routed_body,
    seeds=(
        b'{"model":"m","prompt":"import os"}',
        b'{"prompt":[5,6,7],"n":2}',
        b'{"messages":[{"role":"user","content":"x"}],"prompt":null}',
        b'{"prompt":"\xff"}',
    ),
    words=(b'"prompt":', b'"messages":', b"\\ud800", b"9" * 30, b"1e999", b"[[", b"\xed\xa0\x80"),
    max_bytes=1024,
)


_METHODS = ("Generate", "Chat", "Embed", "Score", "Tokenize")
Incoming = TypeVar("Incoming", bound=protobuf.Message)
_TENANT = Tenant(name="ann")
_CALL = RpcCall()


def run_grpc_messages(data: bytes) -> None:
    """Return an input or an InvalidRequestError, for a method that the first byte selects."""
    if not data:
        return
    try:
        _grpc_messages_read(_METHODS[data[0] % len(_METHODS)], data[1:])
    except InvalidRequestError:
        return


def _grpc_messages_read(method: str, body: bytes) -> None:
    if method == "Generate":
        _check(read_generation(_parsed(pb.GenerateRequest, body), _CALL, _TENANT))
    elif method == "Chat":
        message = _parsed(pb.ChatRequest, body)
        chat = Chat.from_message(message, tool_format="hermes")
        given = chat.to_input(
            _CALL,
            _TENANT,
            LARGEST,
            known_variables=_known_variables,
            note_ignored=_note_ignored,
        )
        _check(given)
    elif method == "Embed":
        read_embedding(_parsed(pb.EmbedRequest, body), _CALL, _TENANT)
    elif method == "Score":
        read_score(_parsed(pb.ScoreRequest, body), _CALL, _TENANT)
    else:
        read_tokenize(
            _parsed(pb.TokenizeRequest, body),
            _TENANT,
            LARGEST,
            known_variables=_known_variables,
            note_ignored=_note_ignored,
        )


def _known_variables(has_tools: bool) -> frozenset[str]:
    return frozenset(("enable_thinking",))


def _note_ignored(name: str) -> None:
    pass


def _parsed(kind: type[Incoming], body: bytes) -> Incoming:
    return parse(kind, body, LARGEST)


def _grpc_messages_seeds() -> tuple[bytes, ...]:
    return tuple(
        bytes([_METHODS.index(method)]) + body
        for kind, bodies in protobuf_bodies("m").items()
        if (method := kind.partition(" ")[0]) in _METHODS
        for body in bodies
    )


GRPC_MESSAGES = Target(run=run_grpc_messages, seeds=_grpc_messages_seeds())


_NUM_TURNS = 6
_TIMEOUT_S = 5.0


class MemoryServer:
    """Responds to one connection after the other."""

    def __init__(
        self,
        app: ASGIApp,
        loop: asyncio.AbstractEventLoop,
        default_headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """`default_headers` are what each response begins with."""
        self._loop = loop
        self._errors: list[dict[str, Any]] = []  # Any: what asyncio knows of an error
        loop.set_exception_handler(lambda _loop, context: self._errors.append(context))
        self._state = ServerState()
        self._state.default_headers = list(default_headers)
        self._config = uvicorn.Config(
            app,
            http=connection_kind(
                ConnectionOptions(
                    read_timeout_s=_TIMEOUT_S,
                    most_open=8,
                    note_rejection=_memory_server_ignore,
                    note_freed=lambda _: None,
                    note_stall=_memory_server_ignore,
                )
            ),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self._config.load()

    async def respond(self, segments: Iterable[bytes], *, is_at_once: bool = False) -> bytes:
        """Return what is sent to a connection that ends after its segments.

        The loop runs between these unless they arrive at once.
        """
        transport = _Transport()
        connection = self._config.http_protocol_class(  # type: ignore[call-arg]  # of both parsers'
            config=self._config, server_state=self._state, app_state={}, _loop=self._loop
        )
        connection.connection_made(transport)
        for segment in segments:
            if not transport.is_closed:
                connection.data_received(segment)
                if not is_at_once:
                    await _run_loop()
        await _run_loop()
        connection.connection_lost(None)
        await _run_loop()
        assert not self._state.tasks, "a request of a lost connection goes on"
        assert not self._state.connections
        assert not self._errors, self._errors
        return transport.written


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed, "written after the connection was closed"
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def _run_loop() -> None:
    for _ in range(_NUM_TURNS):
        await asyncio.sleep(0)


def _memory_server_ignore(*_given: object) -> None:
    pass


_STATUS = b"HTTP/1.1 "


async def _app(
    scope: _Message,
    receive: Callable[[], Awaitable[_Message]],
    send: Callable[[_Message], Awaitable[None]],
) -> None:
    """Read the body and answer with its length."""
    assert sum(map(len, map(b"".join, scope["headers"]))) <= MAX_HEAD_BYTES
    size, has_more = 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        has_more = message["more_body"]
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


atexit.register(_LOOP.close)


_SERVER = MemoryServer(_app, _LOOP)


def run_http_head(data: bytes) -> None:
    """Answer with whole responses; the first byte selects where the segments meet.

    If it is odd, there may be many, which arrive at once.
    """
    if not data:
        return
    is_at_once = data[0] % 2 == 1
    place = max(1, len(data) * data[0] // 256)
    segments: tuple[bytes, ...] = (data[1:place], data[place:])
    if is_at_once:
        segments = tuple(data[at : at + place] for at in range(1, len(data), place))
    written = _LOOP.run_until_complete(_SERVER.respond(segments, is_at_once=is_at_once))
    assert not written or written.startswith(_STATUS), written[:100]
    assert b" 500 " not in written[: len(_STATUS) + 4], written[:200]


_POST = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"

HTTP_HEAD = Target(
    run=run_http_head,
    seeds=(
        b"\x40" + _POST + b"Content-Length: 2\r\n\r\n{}",
        b"\x80" + _POST + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\nT: v\r\n\r\n",
        b"\xf0" + _POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}",
        b"\x00GET / HTTP/1.0\r\n\r\n",
        b"\x20GET /%7e HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
        b"\x20CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x11" + _POST + b"Content-Length: 4\r\n\r\n{  }",
        b"\xa0" + 2 * b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ),
    words=(
        *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: ", b"Connection: keep-alive\r\n"),
        *(b"HTTP/1.1\r\n", b"HTTP/1.0\r\n", b"Host: y\r\n", b"\r\n\r\n", b"Upgrade: websocket\r\n"),
        *(
            b"OPTIONS * ",
            b"0\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\t",
            b"\x00",
            b"http://",
        ),
    ),
    max_bytes=1024,
)
