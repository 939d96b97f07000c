"""Tool calls under grammars, in each format: `python -m tests.load.tool_calls`.

A tiny model writes whatever the grammar of a request allows: forced calls, named ones, and calls or
an answer with a schema. Half of the requests are streamed. What clients get is compared with the
tokens of the output, which are decoded and read by Python's JSON decoder. Each streamed request is
sent again, whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import tokenizers

from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS, call_form
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["ToolCallRun", "server_arguments"]

_CONCURRENCY = 12
_MAX_TOKENS = 400
_EOS = (0, 1)
_WHERE = {"type": "string", "maxLength": 12}
_SCHEMAS: dict[str, dict[str, Any]] = {  # Any: JSON schemas, here and below
    "look": {
        "type": "object",
        "properties": {"where": _WHERE, "deep": {"type": "boolean"}},
        "required": ["where"],
        "additionalProperties": False,
    },
    "add_numbers": {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
            "unit": {"enum": ["m", 'a"b', None]},
        },
        "required": ["numbers", "unit"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer", "minimum": -9, "maximum": 9}},
    },
}
_ANSWER = {
    "type": "object",
    "properties": {"text": _WHERE, "score": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["text", "score"],
    "additionalProperties": False,
}
_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in _SCHEMAS.items()
]
_CHOICES: tuple[dict[str, Any], ...] = (
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": _ANSWER},
        }
    },
)

FORMATS = tuple(one for one in TOOL_CALL_FORMATS if one != "openai")
"""The turns of gpt-oss have tokens that the tiny model has not."""

_Calls = list[tuple[str, str]]


def server_arguments(tool_format: ToolCallFormat) -> tuple[str, ...]:
    """Return the arguments of a server whose model writes calls in a format.

    In bfloat16, tokens depend on the number of rows of a step.
    """
    return (f"--tool-call-parser={tool_format}", "--dtype=float32", "--log-level=warning")


class ToolCallRun:
    """Requests to one server, and the outcome of their calls."""

    def __init__(self, server: MeasuredServer, tool_format: ToolCallFormat) -> None:
        self.counts: Counter[str] = Counter()
        """What was seen; `lost`, `invented` and `invalid` calls, and `unequal` streams, are
        defects."""
        self.examples: list[str] = []
        """Some defects."""
        self._form = call_form(tool_format)
        self._url = f"{server.url}/v1/chat/completions"
        self._tokenizer = tokenizers.Tokenizer.from_file(str(TINY_LLAMA / "tokenizer.json"))
        # Otherwise the model would hardly ever choose to call.
        mark = self._tokenizer.encode(self._form.mark, add_special_tokens=False).ids
        self._bias = {str(mark[0]): 8.0}

    async def send(self, num_calls: int, *, first_seed: int = 0) -> None:
        """Send requests until as many calls were made."""
        seeds = iter(range(first_seed, 10**9))
        async with httpx.AsyncClient(timeout=120) as client:

            async def send_some() -> None:
                while self.counts["calls"] < num_calls:
                    await self._send_one(client, next(seeds))

            await asyncio.gather(*(send_some() for _ in range(_CONCURRENCY)))

    async def _send_one(self, client: httpx.AsyncClient, seed: int) -> None:
        kind = seed // 2 % len(_CHOICES)
        body: dict[str, Any] = {
            "model": "tiny-llama",
            "messages": [{"role": "user", "content": f"Some things are {seed}"}],
            "tools": _TOOLS,
            "seed": seed,
            "max_tokens": _MAX_TOKENS,
            "return_token_ids": True,
            **_CHOICES[kind],
        }
        if "response_format" in body and seed % 4 < 2:
            # With the bias, a call would follow each call.
            body |= {"logit_bias": self._bias, "parallel_tool_calls": False}
        whole = await self._whole(client, body)
        self._check(kind, *whole)
        if seed % 2:
            streamed = await self._streamed(client, body)
            self._check(kind, *streamed)
            if streamed[3] == whole[3]:
                self.counts["compared_streams"] += 1
                self._expect("unequal", streamed == whole, (streamed, whole))

    async def _whole(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> tuple[str, _Calls, str, list[int]]:
        reply = await client.post(self._url, json=body)
        if reply.is_error:
            raise RuntimeError(f"{reply.text} for {body}")
        (choice,) = reply.json()["choices"]
        message = choice["message"]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        calls = [(one["name"], one["arguments"]) for one in functions]
        return message["content"] or "", calls, choice["finish_reason"], choice["token_ids"]

    async def _streamed(
        self, client: httpx.AsyncClient, body: dict[str, Any]
    ) -> tuple[str, _Calls, str, list[int]]:
        content, reason = "", ""
        calls: _Calls = []
        token_ids: list[int] = []
        async with client.stream("POST", self._url, json=body | {"stream": True}) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                token_ids += choice.get("token_ids") or []
                reason = choice["finish_reason"] or reason
                content += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    if call["index"] == len(calls):
                        calls.append((call["function"]["name"], ""))
                    name, arguments = calls[call["index"]]
                    calls[call["index"]] = (name, arguments + call["function"]["arguments"])
        return content, calls, reason, token_ids

    def _check(
        self, kind: int, content: str, calls: _Calls, reason: str, token_ids: list[int]
    ) -> None:
        """Compare what a client got with the tokens of the output."""
        self.counts["outputs"] += 1
        self.counts[f"finish_reason_{reason}"] += 1
        kept = [one for one in token_ids if one not in _EOS]
        text = self._tokenizer.decode(kept, skip_special_tokens=False)
        if reason == "length":
            # The arguments of its last call are cut off, as the reason says.
            return
        expected = self._calls_in(text, kind)
        self.counts["calls"] += len(expected)
        self.counts["calls_beside_a_schema"] += len(expected) if kind == 2 else 0
        self._expect("lost", len(calls) >= len(expected), (text, calls))
        self._expect("invented", len(calls) <= len(expected), (text, calls))
        for (name, arguments), (expected_name, expected_arguments) in zip(
            calls, expected, strict=False
        ):
            try:
                given = json.loads(arguments)
                jsonschema.validate(given, _SCHEMAS[name])
            except (ValueError, KeyError, jsonschema.ValidationError):
                given = None
            is_same = (name, given) == (expected_name, expected_arguments)
            self._expect("invalid", is_same, (text, calls))
        if expected:
            self._expect("invented", not content, (text, content))
        else:
            self.counts["answers"] += 1
            jsonschema.validate(json.loads(content), _ANSWER)
            self._expect("lost", content == text, (text, content))

    def _calls_in(self, text: str, kind: int) -> list[tuple[str, Any]]:
        """Return the calls of a text, read by Python's JSON decoder."""
        if kind == 0:
            return [(one["name"], one["parameters"]) for one in json.loads(text)]
        if kind == 1:
            return [("look", json.loads(text))]
        found: list[tuple[str, Any]] = []
        place = text.find("{") if text.startswith(self._form.mark) else -1
        while place >= 0:
            call, end = json.JSONDecoder().raw_decode(text, place)
            found.append((call["name"], call[self._form.arguments]))
            place = text.find("{", end)
        return found

    def _expect(self, defect: str, holds: bool, example: object) -> None:
        self.counts[defect] += not holds
        if not holds and len(self.examples) < 5:
            self.examples.append(f"{defect}: {example}")


def main() -> None:
    """Make calls in each format, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="in all formats (%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.tool_calls")
    pin_load()
    total: Counter[str] = Counter()
    for tool_format in FORMATS:
        with MeasuredServer(*server_arguments(tool_format)) as server:
            run = ToolCallRun(server, tool_format)
            asyncio.run(run.send(-(-options.calls // len(FORMATS))))
        report.add(tool_format, dict(sorted(run.counts.items())))
        if run.examples:
            report.add(f"{tool_format}_defects", run.examples)
        total.update(run.counts)
    report.add("total", dict(sorted(total.items())))
    report.write(options.output)


if __name__ == "__main__":
    main()
