"""Attacks by requests that are read whole: large bodies, costly calls, and many of them."""

from __future__ import annotations

import json
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from typing import Any

from pagedray.v1 import pagedray_pb2 as pb
from tests.hostile.attack import Attack, Findings, Target
from tests.hostile.floods import CallFlood, HttpFlood, PostFlood, post_request

__all__ = ["REQUEST_ATTACKS"]

_TIMEOUT_S = 60.0


def _asked(
    connection: HTTPConnection, key: str | None, path: str, body: str
) -> tuple[int, dict[str, Any]]:  # Any: JSON
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


_DEEP = '{"a":' * 150 + "1" + "}" * 150
_VARIABLES = (
    '{"messages":[{"role":"system","content":"y"}]}',
    '{"tools":[]}',
    '{"add_generation_prompt":false}',
    '{"bos_token":"y"}',
    '{"eos_token":"y"}',
    '{"raise_exception":"y"}',
    '{"namespace":"y","range":"y","loop":"y","self":"y"}',
    '{"__class__":"y"}',
    f'{{"enable_thinking":{_DEEP}}}',
    json.dumps({"enable_thinking": [0] * 8000}),
    json.dumps({"enable_thinking": [[None] * 8000] * 8}),
    json.dumps({f"name{number}": "y" * 1000 for number in range(60)}),
    json.dumps({"enable_thinking": "y" * 1_000_000}),
)
"""Variables as JSON that are large, deep, or named as the template's own."""


class _TemplateVariables(Attack):
    """None of them may change what the model reads; the bundled model's template reads none."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Compare the prompt of each conversation with that without variables."""
        end_s = time.monotonic() + seconds
        num_sent, broken = 0, set()
        with closing(HTTPConnection("127.0.0.1", target.http_port, timeout=_TIMEOUT_S)) as server:

            def prompt(variables: str) -> tuple[int, object]:
                body = (
                    '{"model":"tiny-llama","messages":[{"role":"user","content":"x"}],'
                    f'"max_tokens":1,"return_token_ids":true,"chat_template_kwargs":{variables}}}'
                )
                status, answer = _asked(server, target.key, "/v1/chat/completions", body)
                return status, answer.get("prompt_token_ids")

            expected = prompt("null")
            while num_sent < len(_VARIABLES) or time.monotonic() < end_s:
                variables = _VARIABLES[num_sent % len(_VARIABLES)]
                num_sent += 1
                found = prompt(variables)
                if found[0] != 400 and found != expected:
                    broken.add(f"with {variables:.60} it was answered with {found}")
        return Findings(figures={"requests": num_sent}, broken=tuple(sorted(broken)))


_GRAMMAR = """
root ::= (a | b)*
a ::= ("x" | "xx" | "xxx")*
b ::= ("x" a | a "x")*
"""
_ANSWER_S = 180.0
_SHORT_S = 3.0
"""How long a short run waits for an answer."""


class _CostlyGrammar(Attack):
    """Completions that follow a grammar with more derivations of a text at each token."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Generate with it repeatedly; each answer must give the reason for the rejection."""
        end_s = time.monotonic() + seconds
        num_sent, broken = 0, set()
        # The masks have only what others leave of the server's core.
        timeout_s = _ANSWER_S if seconds >= self.full_s else _SHORT_S
        sampling = {"guided_grammar": _GRAMMAR, "max_tokens": 900, "ignore_eos": True}
        body = json.dumps({"model": "tiny-llama", "prompt": "x", **sampling})
        connection = HTTPConnection("127.0.0.1", target.http_port, timeout=timeout_s)
        while not num_sent or time.monotonic() < end_s:
            num_sent += 1
            try:
                status, answer = _asked(connection, target.key, "/v1/completions", body)
            except TimeoutError:
                if timeout_s == _ANSWER_S:
                    broken.add(f"it was not answered within {timeout_s} s")
                break
            if status != 400 or "cannot follow its structure" not in str(answer):
                broken.add(f"it was answered with {status}: {answer!s:.200}")
        connection.close()
        return Findings(figures={"requests": num_sent}, broken=tuple(broken))


class _CancelledCalls(Attack):
    """Each call costs its client 300 bytes, and the server 128 sequences."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send and leave on several connections."""
        body = {"model": "tiny-llama", "prompt": "x" * 200, "n": 128, "max_tokens": 500}
        request = post_request("/v1/completions", {**body, "stream": True}, target.key)
        end_s = time.monotonic() + seconds

        def send_until_end() -> int:
            num_sent = 0
            while time.monotonic() < end_s:
                with socket.create_connection(("127.0.0.1", target.http_port), 30.0) as connection:
                    connection.sendall(request)
                    connection.settimeout(0.02)
                    with suppress(OSError):
                        connection.recv(2**10)
                num_sent += 1
            return num_sent

        with ThreadPoolExecutor(16) as threads:
            runs = [threads.submit(send_until_end) for _ in range(16)]
            return Findings(figures={"calls": sum(one.result() for one in runs)})


_COSTLY_CALLS: dict[str, Attack] = {
    "cancelled_calls": _CancelledCalls(name="cancelled calls of 128 sequences"),
    "costly_grammar": _CostlyGrammar(name="a grammar with costly masks"),
    "template_variables": _TemplateVariables(name="variables of the template"),
}


_CHAT = "/v1/chat/completions"
_SERVED = frozenset(("200", "429"))
_SERVED_OR_REJECTED = frozenset(("200", "400", "429"))
_STEP_TOKENS = "--max-num-batched-tokens=16"
"""A step of 2 048 tokens takes a core a quarter of a second."""
_SALT = "s" * 256
_USER = {"role": "user", "content": "x"}


def _json(**fields: object) -> bytes:
    return json.dumps({"model": "tiny-llama", **fields}, separators=(",", ":")).encode()


def _salted() -> bytes:
    return _json(prompt=[300 + place % 600 for place in range(64)], max_tokens=1, cache_salt=_SALT)


def _with_another_salt(body: bytes) -> bytes:
    return body.replace(_SALT.encode(), secrets.token_hex(128).encode())


def _escaped_text() -> bytes:
    return b'{"model":"tiny-llama","prompt":"%b"}' % (rb"\u20ac" * 340_000)


def _id_list() -> bytes:
    return b'{"model":"tiny-llama","prompt":[1%b]}' % (b",1" * 999_999)


def _long_stops() -> bytes:
    stops = ["a" * 495 + last for last in "bcdefghijklmnopq"]
    return _json(prompt="x", n=128, max_tokens=1, stop=stops)


def _long_text() -> bytes:
    return _json(prompt="word " * 7000)


def _many_members() -> bytes:
    return _json(messages=[_USER], metadata={f"k{index}": "v" for index in range(16_000)})


def _many_documents() -> bytes:
    return _json(query="x", documents=[{"text": "x " * 480}] * 2048)


def _many_messages() -> bytes:
    return _json(messages=[_USER] * 4096)


def _many_blocks() -> bytes:
    block = {"type": "text", "text": "x "}
    return _json(max_tokens=1, messages=[_USER], system=[block] * 8000)


def _many_parts() -> bytes:
    part = {"type": "input_text", "text": "x "}
    return _json(input=[{"role": "user", "content": [part] * 8000}])


def _many_tool_calls() -> bytes:
    """Return a chat request, whose `max_tokens` is not supported."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * 60}
    return _json(max_tokens=0, messages=[message] * 60)


def _parameters(number: int) -> dict[str, object]:
    names = {f"<{index}>": {"type": "string"} for index in range(number)}
    return {"type": "object", "properties": names}


def _counted_tools() -> bytes:
    schema = _parameters(64)
    tools = [{"name": f"f{number}", "input_schema": schema} for number in range(120)]
    return _json(messages=[_USER], tools=tools, tool_choice={"type": "any"})


def _large_tools() -> bytes:
    """Return fewer tools than other limits allow, beside one that must be called."""
    parameters = _parameters(128)
    tools: list[dict[str, object]] = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}
        for number in range(1, 60)
    ]
    forced = {"type": "function", "function": {"name": "f0"}}
    return _json(messages=[_USER], tools=[*tools, forced], tool_choice=forced, max_tokens=1)


def _prompt_reports() -> bytes:
    """Return 13 KB of token ids, for which the response has 130 000 entries."""
    prompts = [[300 + (7 * number + place) % 600 for place in range(200)] for number in range(16)]
    return _json(prompt=prompts, max_tokens=0, echo=True, logprobs=20, prompt_logprobs=20)


def _empty_messages() -> bytes:
    """Return a Chat request that parses to a hundred times its bytes; field 2 is a message."""
    return b"\x12\x00" * 500_000


def _hidden_fields() -> bytes:
    """Return a request with a group of the unknown field 100 in its sampling parameters."""
    hidden = pb.SamplingParams.FromString(b"\xa3\x06" + b"\x08\x01" * 500_000 + b"\xa4\x06")
    hidden.max_tokens = 1
    return pb.GenerateRequest(text="x", sampling=hidden).SerializeToString()


def _packed_ids() -> bytes:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1_000_000)).SerializeToString()


def _large_response(key: str | None) -> bytes:
    """Return 200 bytes of request for 20 MB of JSON."""
    sampling = {"n": 128, "max_tokens": 100, "ignore_eos": True}
    reports = {"logprobs": True, "top_logprobs": 20}
    return post_request(
        _CHAT, {"model": "tiny-llama", "messages": [_USER], **sampling, **reports}, key
    )


def _echoed_tools(key: str | None) -> bytes:
    """Return two megabytes that the model does not see, kept while the call waits."""
    tools = [
        {"type": "function", "name": f"f{number}", "description": "x" * 32_000}
        for number in range(60)
    ]
    body = {"model": "tiny-llama", "input": "x", "max_output_tokens": 900, "stream": True}
    return post_request("/v1/responses", {**body, "tools": tools, "tool_choice": "none"}, key)


def _short_text(key: str | None) -> bytes:
    """Return a text that is just short enough for the event loop."""
    return post_request("/tokenize", {"prompt": "a9$ Z~" * 341}, key)


def _valid_call(key: str | None) -> bytes:
    body = {"model": "tiny-llama", "prompt": "def read(path):", "max_tokens": 1}
    return post_request("/v1/completions", body, key)


def _valid_stream(key: str | None) -> bytes:
    body = {"model": "tiny-llama", "prompt": "def read(path):", "max_tokens": 64}
    return post_request("/v1/completions", {**body, "ignore_eos": True, "stream": True}, key)


REQUEST_ATTACKS: dict[str, Attack] = {
    **_COSTLY_CALLS,
    # Blocks of the prompts are cached and never found again, so that they push others out.
    "cache_salts": PostFlood(
        name="a cache salt for each prompt",
        arguments=(_STEP_TOKENS,),
        body=_salted,
        next_body=_with_another_salt,
        allowed=_SERVED,
    ),
    "escaped_text": PostFlood(name="2 MB of escapes", body=_escaped_text),
    "id_lists": PostFlood(name="a million token ids", body=_id_list),
    # 8 KiB that would become 400 MiB if each sequence had tables of its own.
    "long_stops": PostFlood(
        name="16 long stop strings, 128 times", body=_long_stops, allowed=_SERVED
    ),
    # More at a time than wait in the queue of the thread that tokenizes.
    "long_texts": PostFlood(
        name="90 long texts",
        path="/tokenize",
        body=_long_text,
        num_connections=90,
        allowed=_SERVED,
    ),
    "many_members": PostFlood(name="16000 members of metadata", path=_CHAT, body=_many_members),
    "many_pairs": PostFlood(name="2048 documents to rerank", path="/rerank", body=_many_documents),
    "many_messages": PostFlood(name="4096 messages", path=_CHAT, body=_many_messages),
    "many_blocks": PostFlood(
        name="8000 blocks of a system prompt", path="/v1/messages", body=_many_blocks
    ),
    "many_parts": PostFlood(name="8000 parts of a message", path="/v1/responses", body=_many_parts),
    "many_tool_calls": PostFlood(name="3600 tool calls", path=_CHAT, body=_many_tool_calls),
    # These calls use no engine, hence are not limited by its queue.
    "counted_tools": PostFlood(
        name="120 tools to count",
        path="/v1/messages/count_tokens",
        body=_counted_tools,
        allowed=_SERVED,
    ),
    "large_tools": PostFlood(
        name="60 tools of 128 parameters", path=_CHAT, body=_large_tools, allowed=_SERVED
    ),
    # 64 MiB of a tenant's responses, and what is being written.
    "prompt_reports": PostFlood(
        name="log-probabilities of prompts",
        arguments=(_STEP_TOKENS,),
        body=_prompt_reports,
        num_connections=4,
        allowed=_SERVED_OR_REJECTED,
        max_growth_mib=112.0,
    ),
    "empty_messages": CallFlood(name="500000 empty messages", method="Chat", body=_empty_messages),
    "hidden_fields": CallFlood(name="500000 fields in a group", body=_hidden_fields),
    "packed_ids": CallFlood(name="a million packed token ids", body=_packed_ids),
    "large_responses": HttpFlood(
        name="128 choices with log-probabilities",
        request=_large_response,
        num_connections=2,
        allowed=_SERVED_OR_REJECTED,
        full_s=15.0,
        max_growth_mib=96.0,
    ),
    # 64 MiB of a tenant's bodies, as much of its responses, and of those that are stored, with what
    # the allocator keeps between them; the latter are still stored afterwards.
    "echoed_tools": HttpFlood(
        name="2 MB of tools to repeat",
        request=_echoed_tools,
        allowed=_SERVED_OR_REJECTED,
        max_growth_mib=272.0,
        max_left_mib=112.0,
    ),
    "short_texts": HttpFlood(
        name="200 connections with short texts",
        request=_short_text,
        num_connections=200,
        allowed=_SERVED,
    ),
    "valid_calls": HttpFlood(
        name="200 valid calls at once", request=_valid_call, num_connections=200, allowed=_SERVED
    ),
    "valid_streams": HttpFlood(
        name="200 valid streams at once",
        request=_valid_stream,
        num_connections=200,
        allowed=_SERVED,
    ),
}
"""By name; the name in words is that of the report."""
