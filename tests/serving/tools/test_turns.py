"""Whole turns: reasoning, content and calls, from outputs of any size."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.reasoning import Reasoning
from pagedray.request import FinishReason
from pagedray.structure import Structure
from tests.hostile.fuzz.targets.tool_calls import TARGET

TOOLS = [
    Tool(
        name="look",
        parameters={"properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
    ),
    Tool(name="add", parameters={"properties": {"x": {"type": "number"}}}),
]
SCHEMA = Structure(kind="json_schema", text='{"type": "object"}')
PARTS = ("<think>", "</think>", "<th", "\n", " ", *(word.decode() for word in TARGET.words))
SEEDS = tuple(seed[2:].decode(errors="replace") for seed in TARGET.seeds)


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
