"""Turns whose parts have an order in the response: text behind a call is no part of it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.anthropic.endpoints import MessagesResponse
from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import Echo
from cluster.serving.servicer import GenerationOutput, Usage
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from cluster.serving.openai.event_stream import EventResponse

ARGUMENTS = '{"where": "a b", "deep": true}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = f"I look. {CALL}\nThen I say."
ITEMS = [("text", "I look."), ("call", ARGUMENTS), ("text", "Then I say.")]


class Bytes:
    """A part of the memory for output."""

    def collect(self, num_bytes: int) -> None:
        pass


def messages_response(call: Any, turns: Turns) -> MessagesResponse:
    return MessagesResponse(call, turns, model="tiny")


def responses_response(call: Any, turns: Turns) -> ResponsesResponse:
    return ResponsesResponse(
        call,
        turns,
        model="tiny",
        created_s=0,
        echo=Echo({}, b'"a":0'),
        response_id="resp_r",
        names={},
    )


def response_of(make: Callable[[Any, Turns], EventResponse], pieces: list[str]) -> EventResponse:
    """Return the response to a call that generates the pieces, one in each output."""

    async def outputs() -> AsyncGenerator[GenerationOutput]:
        usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=1)
        for number, piece in enumerate(pieces, 1):
            reason = FinishReason.STOP if number == len(pieces) else None
            sequence = SequenceOutput(index=0, text=piece, token_ids=(5,), finish_reason=reason)
            yield GenerationOutput(
                sequences=(sequence,), usage=usage, is_last=number == len(pieces)
            )

    call = SimpleNamespace(id="r", replayed=None, continuation=None, outputs=outputs)
    use = ToolUse([Tool(name="look", parameters={})], ToolChoice(), tool_format="hermes")
    return make(call, Turns(use))


def items_of(whole: Any) -> list[tuple[str, str]]:
    """Return the texts and the arguments of calls, in their order."""
    if "output" in whole:
        return [
            ("call", item["arguments"])
            if item["type"] == "function_call"
            else ("text", item["content"][0]["text"].strip())
            for item in whole["output"]
        ]
    return [
        ("call", json.dumps(block["input"]))
        if block["type"] == "tool_use"
        else ("text", block["text"].strip())
        for block in whole["content"]
    ]


def streamed_items(events: list[Any]) -> list[tuple[str, str]]:
    """Return the same of a stream."""
    if events[0]["type"] == "response.created":
        return items_of(events[-1]["response"])
    texts: dict[int, str] = {}
    kinds: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            kind = event["content_block"]["type"]
            kinds[event["index"]] = "call" if kind == "tool_use" else kind
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            text = delta.get("text", "") + delta.get("partial_json", "")
            texts[event["index"]] = texts.get(event["index"], "") + text
    return [(kinds[index], text.strip()) for index, text in texts.items()]


@pytest.mark.parametrize("size", [1, 7, 30, 45, 60, 1000])
@pytest.mark.parametrize("make", [messages_response, responses_response])
async def test_text_behind_a_call_is_no_part_of_it(
    make: Callable[[Any, Turns], EventResponse], size: int
) -> None:
    pieces = [TEXT[first : first + size] for first in range(0, len(TEXT), size)]
    parts = await response_of(make, pieces).complete(Bytes())  # type: ignore[arg-type]  # its only method here
    assert items_of(json.loads(b"".join(parts))) == ITEMS
    events = [event async for event in response_of(make, pieces).events()]
    joined = b"".join(event if isinstance(event, bytes) else b"".join(event) for event in events)
    lines = [line for line in joined.splitlines() if line.startswith(b"data: ")]
    assert streamed_items([json.loads(line[6:]) for line in lines]) == ITEMS
