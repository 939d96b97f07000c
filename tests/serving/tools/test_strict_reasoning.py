"""Calls of strict tools behind reasoning, read in pieces by the server and by another reader."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import jsonschema
import pytest

from cluster.serving.reasoning import ReasoningReader
from pagedray.reasoning import Reasoning
from tests.serving.tools.strict_writer import Writer, made_library, read_pieces, use_of
from tests.serving.tools.test_strict_formats import MARKS, READERS, SCHEMA, TOOLS

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.structured.xgrammar_library import XGrammarLibrary

THOUGHTS = ("", "hm", "\nI [put(x=1)]\n", '{"name": "put"}', "a </thin b", "<tool_call>")
BEGINNINGS = {"llama3_json": "{", "pythonic": "[put", "llama4_pythonic": "[put"}


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    return made_library()


def in_pieces(text: str, generator: random.Random) -> list[str]:
    num_cuts = min(len(text), generator.choice((0, 3, 40)))
    cuts = sorted(generator.sample(range(len(text)), k=num_cuts))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("tool_format", sorted(READERS))
def test_calls_behind_reasoning_are_valid(
    library: XGrammarLibrary, tool_format: ToolCallFormat, *, is_open: bool
) -> None:
    use = use_of(tool_format, TOOLS)
    reasoning = Reasoning(begin="<think>", end="</think>", is_open=is_open)
    writer = Writer(library, use, reasoning)
    num_calls = 0
    for seed in range(24):
        generator = random.Random(seed)
        thought = THOUGHTS[seed % len(THOUGHTS)]
        begin = "" if is_open else "<think>"
        head = f"{begin}{thought}</think>" + "\n" * generator.randrange(3)
        content = "" if tool_format in BEGINNINGS else generator.choice(("", "Sure."))
        writer.restart()
        writer.write([*head, *content, *BEGINNINGS.get(tool_format, "<tool_call>")])
        writer.write_randomly(seed)
        turn = writer.text.removeprefix(head)
        expected = READERS[tool_format](turn) if writer.has_ended else []
        if not expected or any(turn.count(mark) not in (0, len(expected)) for mark in MARKS):
            continue
        reader = ReasoningReader(reasoning)
        pieces = [*map(reader.read_piece, in_pieces(writer.text, generator)), ("", "")]
        assert "".join(before for before, _ in pieces) == thought.strip()
        read_content, calls = read_pieces(use, [behind for _, behind in pieces])
        assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
        assert read_content == content
        for name, arguments in expected:
            num_calls += 1
            if name == "put":
                jsonschema.validate(arguments, SCHEMA)
    assert num_calls > 5
