"""Tool calls in generated text, parsed in pieces of any size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.tools.json_calls import ListReader, NamedReader
from cluster.serving.tools.tool_calls import ToolCallFormat, detect_format, turn_reader

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import TurnReader

STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS: dict[str, dict[str, Any]] = {  # Any: JSON schemas
    "look": {"type": "object", "properties": {"where": STRING, "deep": {"type": "boolean"}}},
    "typed": {
        "properties": {
            "a": {"type": ["string", "null"]},
            "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "c": True,
            "d": {"type": "integer"},
        }
    },
    "add": {"type": "object", "properties": {"x": NUMBER, "y": {"type": "array"}, "z": {}}},
}

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
    "hermes, other members": (
        "hermes",
        '<tool_call>{"id": 7, "x":true,"name": "look", "arguments": {}, "y": null}</tool_call>',
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
    "qwen3_coder": (
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=look>\n<parameter=where>\na </b> "c"\n\n\n</parameter>\n'
        "<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        '<function=add>\n<parameter=y>\n[1, {"z": null}]\n</parameter>\n<parameter=z>\nfree\n'
        "</parameter>\n</function>\n</tool_call>",
        "I look.",
        [
            ("look", '{"where": "a </b> \\"c\\"\\n\\n", "deep": true}'),
            ("add", '{"y": [1, {"z": null}], "z": "free"}'),
        ],
    ),
    "qwen3_coder, no arguments": (
        "qwen3_coder",
        "<tool_call><function=look></function></tool_call> Then.",
        "Then.",
        [("look", "{}")],
    ),
    "qwen3_coder, unknown tool": (
        "qwen3_coder",
        "<tool_call>\n<function=drop>\n</function>\n</tool_call>",
        "<tool_call>\n<function=drop>\n</function>\n</tool_call>",
        [],
    ),
    "qwen3_coder, cut off": (
        "qwen3_coder",
        "<tool_call>\n<function=look>\n<parameter=where>\nhe",
        "",
        [("look", '{"where": "he')],
    ),
    "glm45": (
        "glm45",
        "\n<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>a <b>\n</arg_value>\n"
        "<arg_key>deep</arg_key>\n<arg_value>false</arg_value>\n</tool_call>\n<tool_call>add"
        "<arg_key>x</arg_key><arg_value>1.5</arg_value></tool_call>",
        "",
        [("look", '{"where": "a <b>\\n", "deep": false}'), ("add", '{"x": 1.5}')],
    ),
    "glm45, types": (
        "glm45",
        "<tool_call>typed<arg_key>a</arg_key><arg_value>5</arg_value><arg_key>b</arg_key>"
        "<arg_value>null</arg_value><arg_key>c</arg_key><arg_value>5</arg_value><arg_key>d</arg_key>"
        "<arg_value>x</arg_value></tool_call>",
        "",
        [("typed", '{"a": "5", "b": null, "c": 5, "d": "x"}')],
    ),
    "glm45, no arguments": ("glm45", "<tool_call>look\n</tool_call>", "", [("look", "{}")]),
    "glm45, unknown tool": ("glm45", "a <tool_call>no such<", "a <tool_call>no such<", []),
    "pythonic": (
        "pythonic",
        '[look(where="a, ) \\" b", deep=True), add(y=[1, {"k": None}], x=-2.5)]',
        "",
        [
            ("look", '{"where": "a, ) \\" b", "deep": true}'),
            ("add", '{"y": [1, {"k": null}], "x": -2.5}'),
        ],
    ),
    "pythonic, content behind": ("pythonic", "[look()]Done.", "Done.", [("look", "{}")]),
    "pythonic, marked": ("pythonic", "<|python_start|>[look()]", "", [("look", "{}")]),
    "pythonic, blanks": ("pythonic", "[ look\n (a=1)]", "", [("look", '{"a": 1}')]),
    "pythonic, constants of JSON": ("pythonic", "[add(z=null)]", "", [("add", '{"z": null}')]),
    "pythonic, no literal": ("pythonic", "[add(x=open('f'))]", "[add(x=open('f'))]", []),
    "pythonic, unknown tool": ("pythonic", "[drop(x=1)]", "[drop(x=1)]", []),
    "pythonic, a list": ("pythonic", "[1, 2]", "[1, 2]", []),
    "pythonic, cut off": ("pythonic", '[look(where="a', '[look(where="a', []),
    "deepseek_v3": (
        "deepseek_v3",
        'I look.[calls_begin][call_begin]function[sep]look\n```json\n{"where": "}"}\n```[call_end]'
        "\n[call_begin]function[sep]add\n```json\n{}\n```[call_end][calls_end]",
        "I look.",
        [("look", '{"where": "}"}'), ("add", "{}")],
    ),
    "deepseek_v31": (
        "deepseek_v31",
        '[calls_begin][call_begin]add[sep]{"x": 1}[call_end][calls_end]',
        "",
        [("add", '{"x": 1}')],
    ),
    "deepseek_v3, unknown tool": (
        "deepseek_v3",
        "[calls_begin][call_begin]function[sep]drop\n```json\n{}\n```[call_end]",
        "[calls_begin][call_begin]function[sep]drop\n```json\n{}\n```[call_end]",
        [],
    ),
    "mistral, unknown tool": ("mistral", "[TOOL_CALLS]drop{}", "[TOOL_CALLS]drop{}", []),
}


def deepseek(text: str) -> str:
    """Return a text with DeepSeek's marks in place of brackets."""
    for name in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"):
        mark = f"<\uff5ctool\u2581{name.replace('_', chr(0x2581))}\uff5c>"
        text = text.replace(f"[{name}]", mark)
    return text


def read(
    reader: TurnReader, text: str, size: int, *, is_cut_off: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Return what a reader parses from a text in pieces, and check the order of its output."""
    content = ""
    calls: list[tuple[str, str]] = []
    ids: list[str] = []
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [reader.read_piece(piece) for piece in pieces]
    for delta in [*deltas, reader.flush(is_cut_off=is_cut_off)]:
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
    text, content = deepseek(text), deepseek(content)
    reader = turn_reader(tool_format, TOOLS, is_parallel=True)
    found = read(reader, text, size, is_cut_off="cut off" in name)
    assert found == (content, calls)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_list_and_named_calls_are_read(size: int) -> None:
    text = '[{"name": "add", "parameters": {"x": 1}}, {"name": "look", "parameters": {}}]'
    reader: TurnReader = ListReader(TOOLS, is_parallel=True, has_short_ids=False)
    assert read(reader, text, size) == ("", [("add", '{"x": 1}'), ("look", "{}")])
    reader = NamedReader({"add": {}}, is_parallel=False, has_short_ids=True)
    assert read(reader, '{"x": [1]}', size) == ("", [("add", '{"x": [1]}')])


def test_only_the_first_call_is_returned_unless_parallel() -> None:
    _, text, _, calls = TURNS["hermes, two"]
    reader = turn_reader("hermes", TOOLS, is_parallel=False)
    deltas = [*reader.read_piece(text).calls, *reader.flush().calls]
    assert {delta.index for delta in deltas} == {0}
    assert "".join(delta.arguments for delta in deltas) == calls[0][1]


OBJECT = '{"name": "add", "parameters": {"x": 1}}'
CALL = '[call_begin]add[sep]{"x": 1}[call_end]'
FOUR_CALLS: dict[ToolCallFormat, str] = {
    "hermes": f"<tool_call>{OBJECT}</tool_call>" * 4,
    "llama3_json": ";".join([OBJECT] * 4),
    "mistral": f"[TOOL_CALLS][{','.join([OBJECT] * 4)}]",
    "pythonic": "[add(x=1), add(x=1), add(x=1), add(x=1)]",
    "deepseek_v31": f"[calls_begin]{CALL * 4}[calls_end]",
}


@pytest.mark.parametrize("size", [1, 9, 1000])
@pytest.mark.parametrize("tool_format", FOUR_CALLS)
def test_any_number_of_calls_is_read_from_a_piece(tool_format: ToolCallFormat, size: int) -> None:
    reader = turn_reader(tool_format, TOOLS, is_parallel=True)
    content, calls = read(reader, deepseek(FOUR_CALLS[tool_format]), size)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("add", {"x": 1})] * 4


def test_arguments_are_streamed_as_they_are_generated() -> None:
    reader = turn_reader("hermes", TOOLS, is_parallel=True)
    reader.read_piece('<tool_call>{"name": "look", "arguments": {"where": "he')
    (delta,) = reader.read_piece("re and th").calls
    assert delta.arguments == "re and th"


def test_ids_of_mistral_are_accepted_by_its_templates() -> None:
    reader = turn_reader("mistral", TOOLS, is_parallel=True)
    (begun, *_) = reader.read_piece('[TOOL_CALLS]add{"x":1}').calls
    assert begun.id is not None
    assert len(begun.id) == 9
    assert begun.id.isalnum()


def test_long_object_that_names_no_tool_is_content() -> None:
    text = json.dumps({"text": "x" * 5000})
    reader = turn_reader("llama3_json", TOOLS, is_parallel=True)
    assert reader.read_piece(text[:4500]).content == text[:4500]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function={% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>{name}<arg_key>{% endif %}", "glm45"),
        ("{% if tools %}[func_name1(params_name1=value)]{% endif %}", "pythonic"),
        (
            deepseek("{% if tools %}[calls_begin]{% endif %}"),
            "deepseek_v3",
        ),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}call them{% endif %}", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_format_is_found_in_the_template(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected
