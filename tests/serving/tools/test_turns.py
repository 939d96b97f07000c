"""Turns: their parts, their order, and grammars that let the model call tools or answer."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.serving.anthropic.endpoints import MessagesResponse
from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import Echo
from cluster.serving.servicer import GenerationOutput, Usage
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.token_matchers import MarkMatcher, ReasoningMatcher, Vocabulary
from cluster.structured.xgrammar_library import XGrammarLibrary
from pagedray.errors import InvalidRequestError
from pagedray.request import AnswerHeader, FinishReason, Reasoning
from pagedray.sampling_params import Structure
from tests.hostile.fuzz.targets.tool_calls import TOOL_CALLS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

    from cluster.serving.openai.event_stream import EventResponse
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnDelta
    from cluster.structured.token_matchers import TokenMatcher

TOOLS = [
    Tool(
        name="look",
        parameters={"properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
    ),
    Tool(name="add", parameters={"properties": {"x": {"type": "number"}}}),
]
SCHEMA = Structure(kind="json_schema", text='{"type": "object"}')
PARTS = ("<think>", "</think>", "<th", "\n", " ", *(word.decode() for word in TOOL_CALLS.words))
SEEDS = tuple(seed[2:].decode(errors="replace") for seed in TOOL_CALLS.seeds)


class CharacterTokens:
    """A vocabulary whose tokens are characters."""

    def bytes_of(self, token_id: int) -> bytes:
        return chr(token_id).encode(errors="replace")


def turns_of(tool_format: str, *, is_open: bool, has_schema: bool) -> Turns:
    use = ToolUse(TOOLS, ToolChoice(), tool_format=tool_format)  # type: ignore[arg-type]  # a literal
    if has_schema:
        use.structure(SCHEMA, "response_format")
    reasoning = Reasoning(begin="<think>", end="</think>", is_open=is_open)
    return Turns(use, reasoning, CharacterTokens())  # type: ignore[arg-type]  # its only method


def read(turns: Turns, pieces: list[str]) -> tuple[str, str, list[list[str]], int]:
    """Return reasoning, content, calls and the number of tokens of the reasoning."""
    turn = turns.begin_turn()
    reasoning = content = ""
    calls: list[list[str]] = []
    for number, piece in enumerate([*pieces, ""]):
        is_last = number == len(pieces)
        delta = turn.read(
            SequenceOutput(
                index=0,
                text=piece,
                token_ids=tuple(map(ord, piece)),
                finish_reason=FinishReason.STOP if is_last else None,
            )
        )
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return reasoning, content, calls, turns.num_reasoning_tokens


@pytest.mark.parametrize("tool_format", TOOL_CALL_FORMATS)
@settings(max_examples=60)
@given(
    seed=st.sampled_from(SEEDS),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    cut=st.integers(0, 60),
    is_open=st.booleans(),
    has_schema=st.booleans(),
    order=st.integers(0, 2**32),
)
def test_any_split_reads_as_the_whole(
    tool_format: str,
    seed: str,
    parts: list[str],
    cut: int,
    is_open: bool,
    has_schema: bool,
    order: int,
) -> None:
    text = "".join(parts) + seed[cut:]
    generator = random.Random(order)
    pieces: list[str] = []
    while text:
        size = generator.choice((1, 1, 2, 5, 20))
        pieces.append(text[:size])
        text = text[size:]
    whole = ["".join(pieces)]
    assert read(turns_of(tool_format, is_open=is_open, has_schema=has_schema), pieces) == read(
        turns_of(tool_format, is_open=is_open, has_schema=has_schema), whole
    )


def test_turn_of_gemma4_is_read_however_it_is_cut() -> None:
    call = '<|tool_call>call:look{where:<|"|>a {"}<|"|>,deep:true}<tool_call|>'
    text = f"<|channel>thought\nI {call}.\n<channel|>So {call}{call.replace('look', 'add')}"
    use = ToolUse(TOOLS, ToolChoice(), tool_format="gemma4")
    reasoning = Reasoning(begin="<|channel>thought", end="<channel|>")
    arguments = '{"where":"a {\\"}","deep":true}'
    num_reasoning = text.index("<channel|>") + len("<channel|>")
    expected = (f"I {call}.", "So", [["look", arguments], ["add", arguments]], num_reasoning)
    for end in range(len(text) + 1):
        turns = Turns(use, reasoning, CharacterTokens())  # type: ignore[arg-type]  # its only method
        assert read(turns, [text[:end], text[end:]]) == expected
    turns = Turns(use, reasoning, CharacterTokens())  # type: ignore[arg-type]  # its only method
    assert read(turns, list(text)) == expected


def test_reasoning_precedes_a_call_and_may_mention_one() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"where": "a"}}</tool_call>'
    text = f"<think>\nI {call}\n</think>\n\nSo {call}"
    found = read(turns_of("hermes", is_open=False, has_schema=False), list(text))
    assert found == (
        f"I {call}",
        "So",
        [["look", '{"where": "a"}']],
        len(text.partition("\n\nSo")[0]),
    )


def test_text_without_reasoning_counts_none() -> None:
    for text in ("<thi", "Yes", ""):
        found = read(turns_of("hermes", is_open=False, has_schema=False), list(text))
        assert found == ("", text, [], 0)


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


EOS = 0
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
TEXTS = (
    *("", *SPECIAL, "<tool_call>", "</tool_call>", "\n", "\uff5c", "\u2581"),
    *map(chr, range(32, 127)),
)
INTEGER = {"type": "integer"}
STRUCTURES_TOOLS = [
    Tool(
        name="look",
        parameters={
            "type": "object",
            "properties": {"where": {"enum": ["a", 1]}},
            "additionalProperties": False,
            "required": [],
        },
    ),
    Tool(
        name="add",
        parameters={
            "type": "object",
            "properties": {
                "x": {"$ref": "#/$defs/n"},
                "y": {"$ref": "#/properties/x"},
                "more": {"$ref": "#"},
            },
            "additionalProperties": False,
            "required": ["x"],
            "$defs": {"n": INTEGER},
        },
    ),
]
STRUCTURES_SCHEMA = {
    "type": "object",
    "properties": {"k": {"$ref": "#/$defs/n"}},
    "required": ["k"],
    "$defs": {"n": {"enum": [True, 2]}},
}
ANSWER = Structure(kind="json_schema", text=json.dumps(STRUCTURES_SCHEMA))


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    tokens = tuple(b"" if text in SPECIAL else text.encode() for text in TEXTS)
    special = {text: TEXTS.index(text) for text in SPECIAL}
    return XGrammarLibrary(
        Vocabulary(tokens=tokens, eos_token_ids=(EOS,), special_token_ids=special)
    )


def use_of(tool_format: ToolCallFormat, *, is_parallel: bool) -> tuple[ToolUse, Structure]:
    use = ToolUse(STRUCTURES_TOOLS, ToolChoice(is_parallel=is_parallel), tool_format=tool_format)
    structure = use.structure(ANSWER, "response_format")
    assert structure is not None
    return use, structure


def written(
    library: XGrammarLibrary,
    compiled: Any,  # Any: the library's own type
    mark: str,
    seed: int,
) -> tuple[str, bool]:
    """Return a random text that the masks allow, and whether it has ended."""
    inner = library.matcher(compiled)
    mark_id = library.special_token_ids.get(mark)
    matcher: TokenMatcher = inner
    if mark_id is not None:
        matcher = MarkMatcher(inner, mark_id, mark)
    return sampled(library, matcher, TEXTS, seed)


def sampled(
    library: XGrammarLibrary, matcher: TokenMatcher, texts: Sequence[str], seed: int
) -> tuple[str, bool]:
    """Return a random text that the masks of a matcher allow, and whether it has ended."""
    generator = random.Random(seed)
    output = ""
    for _ in range(400):
        masks = np.zeros((1, library.num_mask_words), dtype=np.int32)
        matcher.write_mask(masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), count=len(texts), bitorder="little")
        chosen = generator.choice(np.flatnonzero(bits).tolist())
        if chosen == EOS:
            return output, True
        assert matcher.accept_token(chosen), (output, texts[chosen])
        output += texts[chosen]
    return output, False


def joined(deltas: Iterable[TurnDelta]) -> tuple[str, dict[int, tuple[str | None, str]]]:
    """Return the content, and the name and the arguments of each call."""
    content = ""
    calls: dict[int, tuple[str | None, str]] = {}
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            name, arguments = calls.get(call.index, (call.name, ""))
            calls[call.index] = (name, arguments + call.arguments)
    return content, calls


def check_call(name: str, arguments: str) -> None:
    (schema,) = [tool.schema() for tool in STRUCTURES_TOOLS if tool.name == name]
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tool_format", [one for one in TOOL_CALL_FORMATS if one != "openai"])
def test_model_chooses_calls_or_the_answer(
    library: XGrammarLibrary, tool_format: ToolCallFormat, is_parallel: bool
) -> None:
    most_calls = num_answers = 0
    use, structure = use_of(tool_format, is_parallel=is_parallel)
    compiled, _ = library.compile_grammar(grammar_text(structure))
    for seed in range(30):
        text, has_ended = written(library, compiled, structure.mark, seed)
        if not has_ended:
            continue
        reader = use.reader()
        content, calls = joined([*map(reader.read_piece, text), reader.flush()])
        if calls:
            assert not content
            assert len(calls) == text.count('"name"')
            for name, arguments in calls.values():
                check_call(name or "", arguments)
        else:
            assert json.loads(content)["k"] in (True, 2)
            assert content == text
            num_answers += 1
        most_calls = max(most_calls, len(calls))
    assert num_answers > 2
    assert most_calls > 1 if is_parallel else most_calls == 1


CHANNELS = (
    *("", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
    *("assistant", "analysis", "final", "commentary", "functions", "json"),
    *map(chr, range(32, 127)),
)
NUM_SPECIAL = 6


def channel_ids(text: str) -> tuple[int, ...]:
    """Return the tokens of a header."""
    words = re.findall("|".join([*map(re.escape, CHANNELS[1:12]), "."]), text)
    return tuple(map(CHANNELS.index, words))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", ["named", "required", "auto", "strict"])
def test_calls_in_channels_are_valid(kind: Any, is_open: bool) -> None:
    texts = [b"" if number < NUM_SPECIAL else one.encode() for number, one in enumerate(CHANNELS)]
    special = {text: CHANNELS.index(text) for text in CHANNELS[1:NUM_SPECIAL]}
    channels = XGrammarLibrary(
        Vocabulary(tokens=tuple(texts), eos_token_ids=(EOS,), special_token_ids=special)
    )
    answer = ANSWER if kind == "auto" else None
    choice = ToolChoice(kind="auto" if kind == "strict" else kind, name="add")
    tools = [replace(tool, is_strict=kind == "strict") for tool in STRUCTURES_TOOLS]
    use = ToolUse(tools, choice, tool_format="openai")
    structure = use.structure(answer, "response_format")
    assert structure is not None
    reasoning = Reasoning(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        mark_tokens=tuple((one, text) for text, one in special.items()),
        answer_headers=tuple(
            AnswerHeader(channel_ids(header), text) for header, text in structure.headers
        ),
        num_prompt_tokens=2,
        is_open=is_open,
    )
    compiled, _ = channels.compile_grammar(grammar_text(structure))
    seen = set()
    for seed in range(60):
        matcher = ReasoningMatcher(
            channels.matcher(compiled), reasoning, channels.index, eos_token_ids=(EOS,)
        )
        text, has_ended = sampled(channels, matcher, CHANNELS, seed)
        if not has_ended:
            continue
        reader = use.channel_reader(is_open=is_open)
        content, calls = joined([*map(reader.read_piece, text), reader.flush()])
        if calls:
            ((name, arguments),) = calls.values()
            check_call(name or "", arguments)
            seen.add(name)
            assert not content
        else:
            assert kind == "strict" or json.loads(content)["k"] in (True, 2)
            seen.add("an answer")
    expected = {"named": {"add"}, "required": {"look", "add"}}
    assert seen == expected.get(kind, {"look", "add", "an answer"})


def test_forced_call_leaves_the_answer_out() -> None:
    for kind in ("required", "named"):
        choice = ToolChoice(kind=kind, name="add")
        use = ToolUse(STRUCTURES_TOOLS, choice, tool_format="hermes")
        structure = use.structure(ANSWER, "response_format")
        assert structure is not None
        assert structure.kind == "json_schema"
        assert "true" not in structure.text


def test_grammar_of_a_client_cannot_be_joined() -> None:
    use = ToolUse(STRUCTURES_TOOLS, ToolChoice(), tool_format="hermes")
    grammar = Structure(kind="grammar", text='root ::= "a"')
    for param, name in (("guided_grammar", "guided_grammar"), (None, "structure")):
        with pytest.raises(InvalidRequestError, match=f"^{name} cannot be combined with tools"):
            use.structure(grammar, param)
