"""How fast an idle server rejects bad requests: `python -m tests.load.bad_requests`.

Each request is sent repeatedly over both frontends, and must be rejected with the expected status
and a well-formed error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from tests.load.keep_alive import KeepAlive
from tests.load.measured_server import MeasuredServer, pin_load, write_keys
from tests.load.report import Report, times_ms
from tests.serving.grpc_frontend import status_of_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

_MEBIBYTE = 2**20
_SHORT = {"model": "tiny-llama", "max_tokens": 4}
_COMPLETION = {**_SHORT, "prompt": "x"}
_CHAT = {**_SHORT, "messages": [{"role": "user", "content": "x"}]}
_RESPONSE = {"model": "tiny-llama", "max_output_tokens": 4, "input": "x"}
_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
_TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCase:
    """A request over HTTP, and its expected status."""

    body: bytes
    path: str = _COMPLETIONS
    status: int = 400
    key: str | None = "ann"
    """The tenant whose key is sent; None sends none."""
    content_type: str = "application/json"
    more: str = ""
    """Further header lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcCase:
    """A call over gRPC, and its expected status code."""

    body: bytes
    method: str = "Generate"
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    key: str | None = "ann"
    timeout_s: float = 30.0
    more: tuple[tuple[str, str], ...] = ()
    """Further metadata."""
    compression: grpc.Compression = grpc.Compression.NoCompression


def _completion(**changes: object) -> HttpCase:
    return HttpCase(body=json.dumps(_COMPLETION | changes).encode())


def _chat(**changes: object) -> HttpCase:
    return HttpCase(body=json.dumps(_CHAT | changes).encode(), path=_CHATS)


def _response(**changes: object) -> HttpCase:
    return HttpCase(body=json.dumps(_RESPONSE | changes).encode(), path=_RESPONSES)


def _message(**changes: object) -> HttpCase:
    return HttpCase(body=json.dumps(_CHAT | changes).encode(), path=_MESSAGES)


def _nested(name: str, inner: object, depth: int) -> object:
    for _ in range(depth):
        inner = {name: inner}
    return inner


def _wide_schema(number: int) -> dict[str, object]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(number)}}


STRUCTURES: dict[str, tuple[str, str]] = {
    "regex of nested repetitions": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "regex of a million characters": ("regex", "(a{1000}){1000}"),
    "regex of alternatives in repetitions": ("regex", "(a|b|ab|ba|aab|bba){1000}(x|y){1000}"),
    "regex with counted gaps": ("regex", "(.*a.{900}){3}"),
    "regex whose states double": ("regex", "(a|b)*a(a|b){30}"),
    "regex whose states double, twice": ("regex", "[ab]*a[ab]{14}c[ab]*a[ab]{14}"),
    "regex of 5000 characters": ("regex", "ab?" * 1700),
    "regex of 4000 optional letters": ("regex", "a?" * 2000),
    "regex of nested groups": ("regex", "(" * 500 + "a" + ")" * 500),
    "regex that is none": ("regex", "(a"),
    "regex with a look-ahead": ("regex", "(?=a)a"),
    "regex with a back reference": ("regex", "(a)\\1"),
    "grammar that is none": ("grammar", "root ::= ::= "),
    "grammar without a root": ("grammar", 'x ::= "a"'),
    "grammar that recurs to its left": ("grammar", 'root ::= root "a" | "a"'),
    "grammar of 70 000 bytes": ("grammar", "root ::= " + '"a" | ' * 11_700 + '"b"'),
    "grammar of nested repetitions": (
        "grammar",
        'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x"{1000}',
    ),
    "grammar of ambiguous words": (
        "grammar",
        'root ::= (a | b)*\na ::= ("x" | "xx" | "xxx")* \nb ::= ("x" a | a "x")* ',
    ),
    "schema of 70 000 bytes": ("json_schema", json.dumps(_wide_schema(2300))),
    "schema of 4000 properties": (
        "json_schema",
        json.dumps({"properties": {str(i): {} for i in range(4200)}}, separators=(",", ":")),
    ),
    "schema of depth 200": ("json_schema", json.dumps(_nested("not", {}, 200))),
    "schema of properties in properties": (
        "json_schema",
        json.dumps(_nested("properties", {"a": {"type": "object"}}, 70)),
    ),
    "schema of many choices": (
        "json_schema",
        json.dumps({"anyOf": [{"const": "x" * i} for i in range(300)]}),
    ),
    "schema of choices in choices": (
        "json_schema",
        json.dumps({"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 30}
                              for i in range(12)} | {"d12": {"type": "string"}},
                    "$ref": "#/$defs/d0"}),
    ),
    "schema of a huge list": (
        "json_schema",
        json.dumps({"type": "array", "minItems": 4096, "items": {"type": "array",
                    "minItems": 4096, "items": {"type": "string", "minLength": 4096}}}),
    ),
    "schema that refers to itself": (
        "json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "schema that refers elsewhere": ("json_schema", '{"$ref":"http://localhost/x"}'),
    "schema with an exploding pattern": (
        "json_schema", json.dumps({"type": "string", "pattern": "^((a{1,1000}){1,1000})$"})),
    "schema that is none": ("json_schema", '{"type":"nothing"}'),
    "schema that is no JSON": ("json_schema", '{"type":'),
}  # fmt: skip
"""Structures to reject, or to compile within limits; these are reported separately."""

_HTTP_KEYS = {"regex": "guided_regex", "grammar": "guided_grammar", "json_schema": "guided_json"}

HTTP_CASES: dict[str, HttpCase] = {
    # Authentication.
    "no key": HttpCase(body=b"{", status=401, key=None),
    "unknown key": HttpCase(
        body=b"{", status=401, key=None, more="authorization: Bearer pr-unknown\r\n"
    ),
    "another scheme": HttpCase(
        body=b"{", status=401, key=None, more="authorization: Basic YTpi\r\n"
    ),
    "two keys": HttpCase(body=b"{", status=401, more="authorization: Bearer pr-unknown\r\n"),
    "priority of an admin": HttpCase(
        body=json.dumps({**_COMPLETION, "priority": -1}).encode(), status=403
    ),
    # Transport.
    "no endpoint": HttpCase(body=b"{}", path="/v1/nothing", status=404),
    "no such method": HttpCase(body=b"{}", path="/v1/models", status=405),
    "another type of content": HttpCase(body=b"x", status=415, content_type="text/plain"),
    "compressed": HttpCase(body=b"x", status=415, more="content-encoding: gzip\r\n"),
    "long id": HttpCase(
        body=json.dumps(_COMPLETION).encode(), more=f"x-request-id: {'x' * 129}\r\n"
    ),
    "5 MiB": HttpCase(body=b"x" * 5 * _MEBIBYTE, status=413),
    "16 MiB": HttpCase(body=b"x" * 16 * _MEBIBYTE, status=413),
    # Invalid JSON.
    "empty": HttpCase(body=b""),
    "half a body": HttpCase(body=b'{"model":'),
    "no object": HttpCase(body=b"[]"),
    "bytes that are no UTF-8": HttpCase(body=b'{"model":"tiny-llama","prompt":"\xff\xfe"}'),
    "lone surrogate": HttpCase(body=b'{"model":"tiny-llama","prompt":"\\ud800"}'),
    "byte order mark": HttpCase(body=b"\xef\xbb\xbf" + json.dumps(_COMPLETION).encode()),
    "not a number": HttpCase(body=b'{"model":"tiny-llama","prompt":"x","temperature":NaN}'),
    "number beyond all": HttpCase(body=b'{"model":"tiny-llama","prompt":"x","n":1e999}'),
    "400 digits": HttpCase(body=b'{"model":"tiny-llama","prompt":"x","n":' + b"9" * 400 + b"}"),
    "two members of a name": HttpCase(body=b'{"model":"x","model":"tiny-llama","prompt":"x"}'),
    "100 000 deep": HttpCase(body=b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "100 000 deep, unclosed": HttpCase(body=b"[" * 100_000),
    "a million values": HttpCase(
        body=b'{"model":"tiny-llama","prompt":[' + b"5," * 1_000_000 + b"5]}"
    ),
    "500 000 tokens": HttpCase(
        body=b'{"model":"tiny-llama","prompt":[' + b"5," * 500_000 + b"5]}"
    ),
    "300 000 members": HttpCase(
        body=b'{"model":"tiny-llama",' + b'"a":1,' * 300_000 + b'"b":1}'
    ),
    # Invalid fields.
    "unknown model": HttpCase(
        body=json.dumps({**_COMPLETION, "model": "gpt-5"}).encode(), status=404
    ),
    "unknown field": _completion(nothing=1),
    "text too long": _completion(prompt="x" * 1_000_000),
    "empty prompt": _completion(prompt=""),
    "prompt of the wrong type": _completion(prompt={"a": 1}),
    "token out of range": _completion(prompt=[5, 99_999]),
    "129 prompts": _completion(prompt=["x"] * 129),
    "n of a billion": _completion(n=10**9),
    "max_tokens of the wrong type": _completion(max_tokens="5"),
    "max_tokens too large": _completion(max_tokens=100_000),
    "temperature below 0": _completion(temperature=-1),
    "top_p of a text": _completion(top_p="a"),
    "17 stops": _completion(stop=["x"] * 17),
    "stop of 1000 characters": _completion(stop="x" * 1000),
    "100 000 stop tokens": _completion(stop_token_ids=[5] * 100_000),
    "21 log-probabilities": _completion(logprobs=21),
    "1025 biases": _completion(logit_bias=dict.fromkeys(map(str, range(1025)), 1)),
    "30 000 biases": _completion(logit_bias=dict.fromkeys(map(str, range(30_000)), 1)),
    "1025 tools": _chat(tools=[_TOOL] * 1025),
    "description of 100 000 characters": _chat(
        tools=[{"type": "function", "function": {"name": "a", "description": "x" * 100_000}}]
    ),
    "4097 messages": _chat(messages=[{"role": "user", "content": "x"}] * 4097),
    "message of the wrong type": _chat(messages=[5]),
    "unknown role": _chat(messages=[{"role": "god", "content": "x"}]),
    "no vectors here": HttpCase(
        body=b'{"model":"tiny-llama","input":"x"}', path="/v1/embeddings"
    ),
    "tokenize nothing": HttpCase(body=b"{}", path="/tokenize"),
    "detokenize the wrong type": HttpCase(body=b'{"tokens":["a"]}', path="/detokenize"),
}  # fmt: skip
HTTP_CASES |= {
    name: _completion(**{_HTTP_KEYS[kind]: json.loads(text) if _is_object else text})
    for name, (kind, text) in STRUCTURES.items()
    for _is_object in [kind == "json_schema" and name != "schema that is no JSON"]
}


_ITEM = {"role": "user", "content": "x"}
_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
_PART = {"type": "input_text", "text": "x"}
_BLOCK = {"type": "text", "text": "x"}
HTTP_CASES |= {
    f"{path}: {name}": case
    for path in (_RESPONSES, f"{_RESPONSES}/input_tokens", _MESSAGES, f"{_MESSAGES}/count_tokens")
    for name, case in {
        "no key": HttpCase(body=b"{", path=path, status=401, key=None),
        "another type of content": HttpCase(
            body=b"x", path=path, status=415, content_type="text/plain"
        ),
        "16 MiB": HttpCase(body=b"x" * 16 * _MEBIBYTE, path=path, status=413),
        "half a body": HttpCase(body=b'{"model":', path=path),
        "100 000 deep": HttpCase(body=b'{"input":' * 100_000 + b"1" + b"}" * 100_000, path=path),
        "300 000 members": HttpCase(body=b"{" + b'"a":1,' * 300_000 + b'"b":1}', path=path),
        "unknown field": HttpCase(body=b'{"model":"tiny-llama","nothing":1}', path=path),
        "unknown model": HttpCase(
            body=json.dumps(
                {**_CHAT, "model": "gpt-5"}
                if path == _MESSAGES
                else {"model": "gpt-5", "messages": [_ITEM]}
                if path.startswith(_MESSAGES)
                else {"model": "gpt-5", "input": "x"}
            ).encode(),
            path=path,
            status=404,
        ),
    }.items()
}
HTTP_CASES |= {
    f"{case.path}: {name}": case
    for name, case in {
        "4097 items": _response(input=[_ITEM] * 4097),
        "item of the wrong type": _response(input=[5]),
        "item of an unknown kind": _response(input=[{"type": "computer_call"}]),
        "text too long": _response(input="x" * 1_000_000),
        "20 000 parts": _response(input=[{**_ITEM, "content": [_PART] * 20_000}]),
        "image": _response(input=[{**_ITEM, "content": [{"type": "input_image"}]}]),
        "arguments of depth 1000": _response(
            input=[{**_CALL, "arguments": '{"a":' * 1000 + "1" + "}" * 1000}]
        ),
        "1025 tools": _response(tools=[{"type": "function", "name": "f"}] * 1025),
        "a tool of OpenAI": _response(tools=[{"type": "web_search"}]),
        "temperature below 0": _response(temperature=-1),
        "max_output_tokens too large": _response(max_output_tokens=100_000),
        "unknown previous response": _response(previous_response_id="resp_1"),
        "previous response of 100 000 characters": _response(previous_response_id="x" * 100_000),
        "background": _response(background=True),
        "schema of depth 200": _response(
            text={"format": {"type": "json_schema", "name": "a", "schema": _nested("not", {}, 200)}}
        ),
    }.items()
}  # fmt: skip
HTTP_CASES |= {
    f"{case.path}: {name}": case
    for name, case in {
        "4097 messages": _message(messages=[_ITEM] * 4097),
        "message of the wrong type": _message(messages=[5]),
        "unknown role": _message(messages=[{**_ITEM, "role": "god"}]),
        "text too long": _message(messages=[{**_ITEM, "content": "x" * 1_000_000}]),
        "20 000 blocks": _message(messages=[{**_ITEM, "content": [_BLOCK] * 20_000}]),
        "image": _message(messages=[{**_ITEM, "content": [{"type": "image"}]}]),
        "no max_tokens": HttpCase(
            body=json.dumps({"model": "tiny-llama", "messages": [_ITEM]}).encode(), path=_MESSAGES
        ),
        "17 stops": _message(stop_sequences=["x"] * 17),
        "1025 tools": _message(tools=[{"name": "f", "input_schema": {"type": "object"}}] * 1025),
        "a tool of Anthropic": _message(tools=[{"type": "bash_20250124", "name": "bash"}]),
        "temperature of a text": _message(temperature="a"),
        "schema of depth 200": _message(
            output_config={"format": {"type": "json_schema", "schema": _nested("not", {}, 200)}}
        ),
    }.items()
}  # fmt: skip


def _generate(**changes: Any) -> GrpcCase:  # Any: fields of all types
    sampling = pb.SamplingParams(max_tokens=4)
    message = pb.GenerateRequest(text="x", sampling=sampling)
    message.MergeFrom(pb.GenerateRequest(**changes))
    return GrpcCase(body=message.SerializeToString())


def _structured(kind: str, text: str) -> GrpcCase:
    structure = pb.Structure()
    setattr(structure, kind, text)
    return _sampled(structure=structure)


def _sampled(**changes: Any) -> GrpcCase:  # Any: fields of all types
    return _generate(sampling=pb.SamplingParams(**changes))


def _call(method: str, message: Message) -> GrpcCase:
    return GrpcCase(body=message.SerializeToString(), method=method)


_TURN = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="x")
_GOOD = pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=4)).SerializeToString()

GRPC_CASES: dict[str, GrpcCase] = {
    "no key": GrpcCase(body=_GOOD, code=grpc.StatusCode.UNAUTHENTICATED, key=None),
    "unknown key": GrpcCase(body=_GOOD, code=grpc.StatusCode.UNAUTHENTICATED, key="unknown"),
    "priority of an admin": GrpcCase(
        body=_GOOD + pb.GenerateRequest(priority=-1).SerializeToString(),
        code=grpc.StatusCode.PERMISSION_DENIED,
    ),
    "no such method": GrpcCase(body=_GOOD, method="Guess", code=grpc.StatusCode.UNIMPLEMENTED),
    "much metadata": GrpcCase(
        body=_GOOD, code=grpc.StatusCode.RESOURCE_EXHAUSTED, more=(("x-large", "x" * 20_000),)
    ),
    "compressed": GrpcCase(
        body=_generate(text="x" * 100_000).body,
        code=grpc.StatusCode.UNIMPLEMENTED,
        compression=grpc.Compression.Gzip,
    ),
    "2.5 MiB": GrpcCase(body=b"x" * (5 * _MEBIBYTE // 2)),
    "8 MiB": GrpcCase(body=b"x" * 8 * _MEBIBYTE, code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    "16 MiB": GrpcCase(body=b"x" * 16 * _MEBIBYTE, code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    "32 MiB": GrpcCase(body=b"x" * 32 * _MEBIBYTE, code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    "64 MiB": GrpcCase(body=b"x" * 64 * _MEBIBYTE, code=grpc.StatusCode.RESOURCE_EXHAUSTED),
    "expired": GrpcCase(body=_GOOD, code=grpc.StatusCode.DEADLINE_EXCEEDED, timeout_s=1e-4),
    "timeout of 0": _generate(timeout={"seconds": 0}),
    "half a message": GrpcCase(body=_GOOD[:-1]),
    "bytes that are no message": GrpcCase(body=b"\xff" * 100),
    "bytes that are no UTF-8": GrpcCase(body=b"\x12\x02\xff\xfe"),
    "unknown field": GrpcCase(body=_GOOD + b"\xf8\x06\x01"),
    "100 000 deep": GrpcCase(body=b"\x0b" * 100_000),
    "a million fields": GrpcCase(body=b"\x28\x01" * 1_000_000 + b"\xf8\x06\x01"),
    "1.5 million unknown fields": GrpcCase(body=b"x" * 3_000_000),
    "unknown model": GrpcCase(
        body=_GOOD + pb.GenerateRequest(model="gpt-5").SerializeToString(),
        code=grpc.StatusCode.NOT_FOUND,
    ),
    "text too long": _generate(text="x" * 1_000_000),
    "empty prompt": GrpcCase(body=b""),
    "500 000 tokens": _generate(token_ids=pb.TokenIds(ids=[5] * 500_000)),
    "token out of range": _generate(token_ids=pb.TokenIds(ids=[99_999])),
    "long id": _generate(request_id="x" * 129),
    "n of a billion": _sampled(n=10**9),
    "max_tokens too large": _sampled(max_tokens=100_000),
    "temperature below 0": _sampled(temperature=-1.0),
    "temperature that is no number": _sampled(temperature=float("nan")),
    "17 stops": _sampled(stop=["x"] * 17),
    "stop of 1000 characters": _sampled(stop=["x" * 1000]),
    "100 000 stop tokens": _sampled(stop_token_ids=[5] * 100_000),
    "21 log-probabilities": _sampled(logprobs=21),
    "1025 biases": _sampled(logit_bias=dict.fromkeys(range(1025), 1.0)),
    "100 000 biases": _sampled(logit_bias=dict.fromkeys(range(100_000), 1.0)),
    "9000 messages": _call("Chat", pb.ChatRequest(messages=[_TURN] * 9000)),
    "1025 tools": _call(
        "Chat", pb.ChatRequest(messages=[_TURN], tools=[pb.Tool(name=f"a{i}") for i in range(1025)])
    ),
    "no vectors here": _call("Embed", pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")])),
    "3000 prompts": _call("Embed", pb.EmbedRequest(prompts=[pb.EmbedPrompt(text="x")] * 3000)),
    "tokenize nothing": GrpcCase(body=b"", method="Tokenize"),
    "detokenize 200 000": _call("Detokenize", pb.DetokenizeRequest(token_ids=[5] * 200_000)),
    "abort 2000": _call("Abort", pb.AbortRequest(request_ids=["a"] * 2000)),
} | {name: _structured(kind, text) for name, (kind, text) in STRUCTURES.items()}


_TARGET_S = 0.05


class Rejections:
    """The responses to all cases."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, object]] = {}
        self.seconds: list[float] = []
        self.structure_seconds: list[float] = []
        self.wrong: list[str] = []
        """The cases with an unexpected status or a malformed error."""
        self.accepted: list[str] = []
        """Structures that were compiled and served."""

    def add(
        self, name: str, status: object, text: str, seconds: list[float], *, is_right: bool
    ) -> None:
        """Add the responses to a case, which were all the same."""
        self.rows[name] = {"status": status, "text": text[:100]} | times_ms(seconds)
        if status in (200, "OK"):
            self.accepted.append(name)
            return
        (self.structure_seconds if name in STRUCTURES else self.seconds).extend(seconds)
        if not is_right:
            self.wrong.append(f"{name}: {status} {text[:200]}")

    def figures(self) -> dict[str, object]:
        """Return the figures of the report."""
        slow = {
            name: row["max_ms"]
            for name, row in self.rows.items()
            if float(str(row["max_ms"])) > _TARGET_S * 1e3 and name not in self.accepted
        }
        return {
            "cases": len(self.rows),
            "wrong": self.wrong,
            "served": self.accepted,
            "refusals": times_ms(self.seconds),
            "refusals_of_structures": times_ms(self.structure_seconds),
            "over_50_ms": slow,
            "rows": self.rows,
        }


async def reject_over_http(
    port: int, keys: dict[str, str], *, repeats: int, cases: Iterable[str] = tuple(HTTP_CASES)
) -> Rejections:
    """Send each case `repeats` times over HTTP."""
    found = Rejections()
    for name in cases:
        case = HTTP_CASES[name]
        headers = {} if case.key is None else {"authorization": f"Bearer {keys[case.key]}"}
        connection = KeepAlive(port, headers=headers)
        seconds = []
        for _ in range(repeats):
            await connection.connect()
            answer = await connection.post(
                case.path, case.body, content_type=case.content_type, more=case.more
            )
            seconds.append(answer.seconds)
        connection.close()
        parsed = json.loads(answer.body)
        error = parsed.get("error", {})
        is_right = answer.status == case.status and _has_shape(parsed, case.path)
        found.add(name, answer.status, error.get("message", ""), seconds, is_right=is_right)
    return found


async def reject_over_grpc(
    target: str, keys: dict[str, str], *, repeats: int, cases: Iterable[str] = tuple(GRPC_CASES)
) -> Rejections:
    """Send each case `repeats` times over gRPC."""
    found = Rejections()
    async with grpc.aio.insecure_channel(target) as channel:
        for name in cases:
            case = GRPC_CASES[name]
            key = None if case.key is None else keys.get(case.key, "pr-unknown")
            seconds = []
            for _ in range(repeats):
                started_s = time.perf_counter()
                code, text, has_details = await _grpc_status(channel, case, key)
                seconds.append(time.perf_counter() - started_s)
            is_right = code is case.code and (has_details or code in _BY_GRPC_ITSELF)
            found.add(name, code.name, text, seconds, is_right=is_right)
    return found


async def _grpc_status(
    channel: grpc.aio.Channel, case: GrpcCase, key: str | None
) -> tuple[grpc.StatusCode, str, bool]:
    """Return the status of a call, its message, and whether it has the details of its error."""
    who = () if key is None else (("authorization", f"Bearer {key}"),)
    method = channel.unary_stream(f"/pagedray.v1.GenerationService/{case.method}")  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
    metadata = (*who, *case.more)
    try:
        async for _ in method(
            case.body, timeout=case.timeout_s, metadata=metadata, compression=case.compression
        ):
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or "", _has_details(error)
    return grpc.StatusCode.OK, "", True


def _has_shape(parsed: dict[str, Any], path: str) -> bool:  # Any: JSON
    """Return whether an error has the shape of the API that a path belongs to."""
    error = set(parsed.get("error", ()))
    if path.startswith("/v1/messages"):
        return parsed.get("type") == "error" and error == {"message", "type"}
    return error == {"message", "type", "param", "code"}


# Decided before our methods run: by the client's own clock, or by gRPC's server.
_BY_GRPC_ITSELF = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def _has_details(error: grpc.aio.AioRpcError) -> bool:
    if error.code() in _BY_GRPC_ITSELF:
        return False
    return len(status_of_call(error).details) >= 1


def main() -> None:
    """Send all cases, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="of each case (%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.bad_requests")
    pin_load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        keys = write_keys(path, "ann")
        with MeasuredServer(f"--api-keys={path}", "--log-level=warning") as server:
            report.add("server", server.command)
            # The first structure loads modules, which is not measured.
            asyncio.run(
                reject_over_http(server.http_port, keys, repeats=1, cases=["regex that is none"])
            )
            report.add("http", asyncio.run(
                reject_over_http(server.http_port, keys, repeats=options.repeats)
            ).figures())  # fmt: skip
            report.add("grpc", asyncio.run(
                reject_over_grpc(server.grpc_target, keys, repeats=options.repeats)
            ).figures())  # fmt: skip
            report.add("errors_in_log", server.logged_errors())
    report.write(options.output)


if __name__ == "__main__":
    main()
