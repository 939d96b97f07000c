"""Grammars of free text with calls of strict tools: random texts that they allow, read back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema
import pytest

from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from tests.serving.tools.strict_writer import (
    EOS,
    LLAMA,
    MISTRAL,
    TEXTS,
    Writer,
    made_library,
    read,
    use_of,
)

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.structured.xgrammar_library import XGrammarLibrary

LEADING_FORMATS = ("llama3_json", "llama4_pythonic", "pythonic")
"""Those in which a turn is calls or text."""
MARKED_FORMATS = [one for one in TOOL_CALL_FORMATS if one not in (*LEADING_FORMATS, "openai")]
SCHEMAS = {
    "look": {
        "type": "object",
        "properties": {"where": {"enum": ["a", 1]}, "deep": {"$ref": "#/$defs/n"}},
        "additionalProperties": False,
        "required": ["where"],
        "$defs": {"n": {"type": "integer"}},
    },
    "look.again": {"type": "object", "properties": {}, "additionalProperties": False},
}
STRICT = [Tool(name=name, parameters=one, is_strict=True) for name, one in SCHEMAS.items()]
UNSUPPORTED = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
LOOSE = Tool(name="loose", parameters=UNSUPPORTED)


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    return made_library()


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tool_format", MARKED_FORMATS)
def test_calls_behind_a_text_are_valid(
    library: XGrammarLibrary, tool_format: ToolCallFormat, is_parallel: bool
) -> None:
    use = use_of(tool_format, [*STRICT, LOOSE], is_parallel=is_parallel)
    writer = Writer(library, use)
    names, most_calls = set(), 0
    for seed in range(40):
        writer.restart()
        writer.write("a {<[ ")
        writer.write(list(writer.mark))
        writer.write_randomly(seed)
        if not writer.has_ended:
            continue
        content, calls = read(use, writer.text)
        assert content == "a {<["
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, {"type": "object"}))
        names |= {name for name, _ in calls}
        most_calls = max(most_calls, len(calls))
    assert names == {"look", "look.again", "loose"}
    assert most_calls > 1 if is_parallel else most_calls == 1


def test_text_may_end_without_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"{ <tool_cal", "</tool_call>", *"l>"])
    assert EOS in writer.allowed()


def test_token_that_completes_the_mark_must_begin_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"<tool_cal", "l>{"])
    assert [TEXTS[one] for one in writer.allowed()] == ["\n", " ", '"']


def test_special_token_marks_calls_behind_a_text(library: XGrammarLibrary) -> None:
    for text in ("", "ab [TOOL_"):
        writer = Writer(library, use_of("mistral", STRICT))
        writer.write([*text, MISTRAL])
        assert EOS not in writer.allowed()
        writer.write('[{"name": "look.again", "arguments": {}}]')
        assert writer.allowed() == [EOS]


def test_special_token_cannot_be_written_in_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("mistral", [LOOSE, STRICT[0]]))
    writer.write([*MISTRAL, *'[{"name": "loose", "arguments": {"'])
    assert TEXTS.index("T") in writer.allowed()
    assert TEXTS.index(MISTRAL) not in writer.allowed()


def test_error_names_the_strict_tool() -> None:
    strict = Tool(name="strict", parameters=UNSUPPORTED, is_strict=True)
    structure = use_of("hermes", [LOOSE, strict]).structure(None, None)
    assert structure is not None
    with pytest.raises(InvalidRequestError, match="strict tool 'strict', which has an unsupported"):
        grammar_text(structure)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", "  {"),
        ("llama3_json", "<|python_tag|>"),
        ("pythonic", " [ loo"),
        ("pythonic", "<|python_start|>"),
        ("llama4_pythonic", "<|python_tag|>"),
    ],
)
def test_turn_that_begins_as_calls_do_consists_of_them(
    library: XGrammarLibrary, tool_format: ToolCallFormat, text: str
) -> None:
    writer = Writer(library, use_of(tool_format, STRICT))
    for letter in text[:-1]:
        writer.write(letter)
        assert EOS in writer.allowed()
    if TEXTS.index(text[-1]) in writer.allowed():
        writer.write(text[-1])
        assert EOS not in writer.allowed()


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("llama3_json", 'a {"name": "look"} <|python_tag|>'),
        ("llama3_json", "<|python_ta g|>"),
        ("pythonic", "[1, [look(where=2)]"),
        ("pythonic", "[lo(]"),
        ("pythonic", "a [look(where=2)]"),
    ],
)
def test_text_that_begins_otherwise_is_free(
    library: XGrammarLibrary, tool_format: ToolCallFormat, text: str
) -> None:
    use = use_of(tool_format, STRICT)
    writer = Writer(library, use)
    writer.write(text)
    assert EOS in writer.allowed()
    assert read(use, writer.text) == (text, [])


def test_special_token_marks_calls_at_the_start_only(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("llama3_json", STRICT))
    writer.write([LLAMA, *'{"name": "look.again", "parameters": {}}'])
    assert EOS in writer.allowed()
    writer.restart()
    writer.write("a")
    assert TEXTS.index(LLAMA) not in writer.allowed()


def test_tools_that_are_not_strict_are_called_freely() -> None:
    assert use_of("hermes", [LOOSE]).structure(None, None) is None
