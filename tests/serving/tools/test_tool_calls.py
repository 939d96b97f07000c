"""Tool calls in generated text, parsed in pieces of any size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.serving.tools.tool_calls import (
    ToolCallFormat,
    detect_format,
    list_reader,
    named_reader,
    turn_reader,
)

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import TurnReader

NAMES = ("look", "add")

TURNS: dict[str, tuple[ToolCallFormat, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        "hermes",
        'I look. \n<tool_call>\n{"name": "look", '
        '"arguments": {"where": "a } \\" b"}}\n</tool_call>',
        "I look.",
        [("look", '{"where": "a } \\" b"}')],
    ),
    "hermes, two": (
        "hermes",
        '<tool_call>{"name":"look","arguments":{}}</tool_call>\n'
        '<tool_call>{"arguments": {"x": [1, {"y": 2}]}, "name": "add"}</tool_call>',
        "",
        [("look", "{}"), ("add", '{"x": [1, {"y": 2}]}')],
    ),
    "hermes, arguments as text": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>',
        "",
        [("add", '{"x": 1}')],
    ),
    "hermes, no arguments": (
        "hermes",
        '<tool_call>{"name": "look"}</tool_call>',
        "",
        [("look", "{}")],
    ),
    "hermes, unknown tool": (
        "hermes",
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>.',
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>.',
        [],
    ),
    "hermes, no JSON": ("hermes", "a <tool_call>look()", "a <tool_call>look()", []),
    "hermes, a part of the mark": ("hermes", "1 <tool <to", "1 <tool <to", []),
    "hermes, cut off": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"where": "he',
        "",
        [("look", '{"where": "he')],
    ),
    "hermes, cut off before the name": (
        "hermes",
        '<tool_call>{"name": "lo',
        '<tool_call>{"name": "lo',
        [],
    ),
    "hermes, content behind": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n\nTwo \n words. \n',
        "Two \n words.",
        [("look", "{}")],
    ),
    "hermes, content around": (
        "hermes",
        'One. <tool_call>{"name": "look", "arguments": {}}</tool_call> Two.',
        "One. Two.",
        [("look", "{}")],
    ),
    "text only": ("hermes", "No call, and space behind. \n", "No call, and space behind. \n", []),
    "llama": (
        "llama3_json",
        '{"name": "add", "parameters": {"x": 1}}',
        "",
        [("add", '{"x": 1}')],
    ),
    "llama, marked, two": (
        "llama3_json",
        '<|python_tag|>{"name": "add", "parameters": {"x": 1}}; {"name": "look", "parameters": {}}',
        "",
        [("add", '{"x": 1}'), ("look", "{}")],
    ),
    "llama, two names": (
        "llama3_json",
        '{"name": "add", "parameters": {"x": 1}, "name": "look"}',
        "",
        [("add", '{"x": 1}')],
    ),
    "llama, other JSON": ("llama3_json", '{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    "llama, text": ("llama3_json", 'Such as {"name": "add"}', 'Such as {"name": "add"}', []),
    "mistral, list": (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"x": "]"}}, '
        '{"name": "look", "arguments": {}}]',
        "",
        [("add", '{"x": "]"}'), ("look", "{}")],
    ),
    "mistral, names": (
        "mistral",
        'Let me.[TOOL_CALLS]add[ARGS]{"x": {"y": "}"}}[TOOL_CALLS]look{"z": 1}',
        "Let me.",
        [("add", '{"x": {"y": "}"}}'), ("look", '{"z": 1}')],
    ),
    "mistral, name and list": (
        "mistral",
        '[TOOL_CALLS]add{"x": 1}[TOOL_CALLS][{"name": "look", "arguments": {}}]',
        "",
        [("add", '{"x": 1}'), ("look", "{}")],
    ),
    "mistral, long name": (
        "mistral",
        f'[TOOL_CALLS]{"x" * 200} [TOOL_CALLS]add{{"x": 1}}',
        f"[TOOL_CALLS]{'x' * 200}",
        [("add", '{"x": 1}')],
    ),
    "mistral, unknown tool": ("mistral", "[TOOL_CALLS]drop{}", "[TOOL_CALLS]drop{}", []),
}


def read(reader: TurnReader, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """Return what a reader parses from a text in pieces, and check the order of its output."""
    content = ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    for delta in [*(reader.read_piece(piece) for piece in pieces), reader.flush()]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                assert call.id is not None
                ids.append(call.id)
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + call.arguments)
    assert reader.num_calls == len(calls)
    assert len(set(ids)) == len(ids)
    return content, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", TURNS)
def test_turn_is_read_in_pieces_of_any_size(name: str, size: int) -> None:
    tool_format, text, content, calls = TURNS[name]
    reader = turn_reader(tool_format, NAMES, is_parallel=True)
    assert read(reader, text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_list_and_named_calls_are_read(size: int) -> None:
    text = '[{"name": "add", "parameters": {"x": 1}}, {"name": "look", "parameters": {}}]'
    reader = list_reader(NAMES, is_parallel=True, has_short_ids=False)
    assert read(reader, text, size) == ("", [("add", '{"x": 1}'), ("look", "{}")])
    reader = named_reader("add", has_short_ids=True)
    assert read(reader, '{"x": [1]}', size) == ("", [("add", '{"x": [1]}')])


def test_only_the_first_call_is_returned_unless_parallel() -> None:
    _, text, _, calls = TURNS["hermes, two"]
    reader = turn_reader("hermes", NAMES, is_parallel=False)
    deltas = [*reader.read_piece(text).calls, *reader.flush().calls]
    assert {delta.index for delta in deltas} == {0}
    assert "".join(delta.arguments for delta in deltas) == calls[0][1]


def test_arguments_are_streamed_as_they_are_generated() -> None:
    reader = turn_reader("hermes", NAMES, is_parallel=True)
    reader.read_piece('<tool_call>{"name": "look", "arguments": {"where": "he')
    (delta,) = reader.read_piece("re and th").calls
    assert delta.arguments == "re and th"


def test_ids_of_mistral_are_accepted_by_its_templates() -> None:
    reader = turn_reader("mistral", NAMES, is_parallel=True)
    (begun, *_) = reader.read_piece('[TOOL_CALLS]add{"x":1}').calls
    assert begun.id is not None
    assert len(begun.id) == 9
    assert begun.id.isalnum()


def test_long_object_that_names_no_tool_is_content() -> None:
    text = json.dumps({"text": "x" * 5000})
    reader = turn_reader("llama3_json", NAMES, is_parallel=True)
    assert reader.read_piece(text[:4500]).content == text[:4500]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function={% endif %}", None),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}call them{% endif %}", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_format_is_found_in_the_template(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected
