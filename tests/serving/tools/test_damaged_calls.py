"""Tool calls as models write them by mistake: each is read, and its arguments are valid JSON."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from pydantic_core import from_json

from cluster.serving.json_body import read_arguments
from cluster.serving.tools.json_calls import ChoiceReader, ListReader, NamedReader
from cluster.serving.tools.object_text import ObjectText
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import (
    LFM2_BEGIN,
    LFM2_END,
    TOOL_CALL_FORMATS,
    ToolCallFormat,
    turn_reader,
)
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from tests.serving.tools.test_tool_calls import deepseek

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.tools.turn_reader import TurnReader

Calls = list[tuple[str, dict[str, Any]]]

TEXT, ANY = {"type": "string"}, True
LOOK = {
    "type": "object",
    "properties": {
        **{"where": TEXT, "deep": {"type": "boolean"}, "tags": {"type": "array"}},
        **{"filter": {"type": "object"}, "count": {"type": "integer"}, "any": ANY},
        "ratio": {"type": "number"},
        "note": {"anyOf": [TEXT, {"type": "null"}]},
        "either": {"type": ["array", "string"]},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"look": LOOK, "now": {"type": "object", "properties": {}}}

OBJECT = '{"name": "look", "arguments": {"where": "a"}}'
NOW = '{"name": "now", "arguments": {}}'
BOTH: Calls = [("look", {"where": "a"}), ("now", {})]
LOOKED: Calls = [("look", {"where": "a"})]
CALLED_NOW: Calls = [("now", {})]
PAIR, HALF = r"\ud83d\ude00", r"\ud83d"
SMILE, LOST = "\U0001f600", "\ufffd"
LINES = "<tool_call>\n<function=look>\n"


def qwen(**values: str) -> str:
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"{LINES}{parameters}</function>\n</tool_call>"


def glm(**values: str) -> str:
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>look\n{arguments}</tool_call>"


def gemma(arguments: str, name: str = "look") -> str:
    """Return a call as Gemma writes it, with `#` as the mark of strings."""
    return f"<|tool_call>call:{name}{arguments}<tool_call|>".replace("#", '<|"|>')


def channel(arguments: str, name: str = "look") -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{arguments}<|call|>"
    )


def in_json(arguments: str) -> Iterator[tuple[ToolCallFormat, str]]:
    """Yield a call of `look` in every format whose arguments are JSON."""
    call = f'{{"name": "look", "arguments": {arguments}}}'
    yield "hermes", f"<tool_call>\n{call}\n</tool_call>"
    yield "hermes", f'<tool_call>{{"arguments": {arguments}, "name": "look"}}</tool_call>'
    yield "llama3_json", call.replace("arguments", "parameters")
    yield "mistral", f"[TOOL_CALLS][{call}]"
    yield "mistral", f"[TOOL_CALLS]look[ARGS]{arguments}"
    yield "mistral", f"[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{arguments}"
    yield "deepseek_v31", f"[calls_begin][call_begin]look[sep]{arguments}[call_end][calls_end]"
    fenced = f"look\n```json\n{arguments}\n```"
    yield "deepseek_v3", f"[calls_begin][call_begin]function[sep]{fenced}[call_end][calls_end]"
    yield "openai", channel(arguments)
    yield "gemma4", f"<|tool_call>call:look{arguments}<tool_call|>"


JSON_ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    # Halves of characters, and whole ones.
    (rf'{{"where": "x {PAIR}{HALF}"}}', {"where": f"x {SMILE}{LOST}"}),
    (rf'{{"where": "\ude00{HALF}", "{HALF}": 1}}', {"where": LOST * 2, LOST: 1}),
    (rf'{{"tags": ["{HALF}\n", {{"k": "\\{HALF}"}}]}}',
     {"tags": [f"{LOST}\n", {"k": f"\\{LOST}"}]}),
    # Characters that JSON requires escapes for, and escapes that it does not have.
    ('{"where": "a\nb\tc\r\x01"}', {"where": "a\nb\tc\r\x01"}),
    (r'{"where": "\d+ \' \x41 C:\apps"}', {"where": r"\d+ ' \x41 C:\apps"}),
    # Python.
    ("{'where': 'it\"s', 'deep': True, 'note': None}",
     {"where": 'it"s', "deep": True, "note": None}),
    ('{"where": """a "b"\nc""", "tags": (1, None,)}', {"where": 'a "b"\nc', "tags": [1, None]}),
    ('{"count": 0x1F, "ratio": .5, "any": 1_000}', {"count": 31, "ratio": 0.5, "any": 1000}),
    # Numbers that no parser reads.
    ('{"any": 1e400, "note": NaN, "count": 007}', {"any": "1e400", "note": "NaN", "count": "007"}),
    (f'{{"any": {"9" * 5000}}}', {"any": "9" * 5000}),
    # Marks that are missing or in excess.
    ('{"where": "a", "tags": [1, 2,],}', {"where": "a", "tags": [1, 2]}),
    ('{"where": "a" "count": 2}', {"where": "a", "count": 2}),
    ('{"where" "a", , "count": 2}', {"where": "a", "count": 2}),
    ('{"tags": [1, {"a": 2}, "count": 2}', {"tags": [1, {"a": 2}, "count"]}),
    ('{"tags": [1, 2}', {"tags": [1, 2]}),
    ('{"where": , "deep": true}', {"where": None, "deep": True}),
    ("{where: New York, count: 2}", {"where": "New York", "count": 2}),
    (f'{{"any": {"[" * 400}{"]" * 400}, "count": 1}}', {"any": ..., "count": 1}),
]  # fmt: skip


def read(
    reader: TurnReader, text: str, sizes: random.Random | None = None, *, is_cut_off: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls of a turn in one piece, or in pieces of random sizes."""
    content, calls, deltas = "", [], []
    while text:
        size = len(text) if sizes is None else sizes.choice((1, 1, 2, 3, 9))
        deltas.append(reader.read_piece(text[:size]))
        text = text[size:]
    for delta in [*deltas, reader.flush(is_cut_off=is_cut_off)]:
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append((call.name, ""))
            assert call.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return content, calls


def check(tool_format: ToolCallFormat, text: str, content: str, calls: Calls) -> None:
    """Check what is read from one piece, from characters and from pieces of random sizes."""
    text, content = deepseek(text), deepseek(content)
    for seed in range(4):
        reader = turn_reader(tool_format, TOOLS, is_parallel=True)
        found = read(reader, text, random.Random(seed) if seed else None)
        assert found[0] == content
        assert [(name, read_arguments(given, "")) for name, given in found[1]] == calls
        for _, given in found[1]:
            assert from_json(given) == json.loads(given)


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize(("arguments", "expected"), JSON_ARGUMENTS)
def test_damaged_json_becomes_valid(number: int, arguments: str, expected: dict[str, Any]) -> None:
    tool_format, text = list(in_json(arguments))[number]
    if expected.get("any") is ...:
        levels = 99 if '"name"' in text else 100
        nested: Any = None
        for _ in range(levels - 1):
            nested = [nested]
        expected = {**expected, "any": nested}
    check(tool_format, text, "", [("look", expected)])


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("arguments", ["null", '""', "{}", " {\n}", "None", "''"])
def test_arguments_that_are_no_object_are_an_empty_one(number: int, arguments: str) -> None:
    tool_format, text = list(in_json(arguments))[number]
    check(tool_format, text, "", [("look", {})])


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("arguments", ["[1]", "5", "true", '"x"', "[]", '{"where": "x"}'])
def test_arguments_within_a_call_of_json(number: int, arguments: str) -> None:
    tool_format, text = list(in_json(arguments))[number]
    # A string may contain the object.
    for given in (arguments, json.dumps(arguments)):
        expected = {"where": "x"} if "where" in arguments else {}
        check(tool_format, text.replace(arguments, given), "", [("look", expected)])


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"where": "a', {"where": "a"}),
        ('{"where": "a\\', {"where": "a\\"}),
        (rf'{{"where": "a{HALF}', {"where": f"a{LOST}"}),
        ('{"where": "a", "tags": [1, {"b": 2', {"where": "a", "tags": [1, {"b": 2}]}),
        ('{"where"', {"where": None}),
        ("{", {}),
    ],
)
def test_object_without_its_end_is_closed(
    number: int, arguments: str, expected: dict[str, Any]
) -> None:
    tool_format, text = list(in_json("@"))[number]
    text = text.partition("@")[0] + arguments
    # The name comes first, or is missing.
    calls = [("look", expected)] if "look" in text else []
    check(tool_format, text, "" if calls else text, calls)
    reader = turn_reader(tool_format, TOOLS, is_parallel=True)
    _, cut = read(reader, deepseek(text), is_cut_off=True)
    assert all(arguments.startswith(given) for _, given in cut if HALF not in arguments)


TURNS: list[tuple[ToolCallFormat, str, str, Calls]] = [
    # Marks between two calls.
    ("hermes", f"<tool_call>{OBJECT}<tool_call>{NOW}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{OBJECT}{NOW}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{OBJECT},\n{NOW}", "", BOTH),
    ("hermes", f"<tool_call>{OBJECT}}}</tool_call><tool_call>{NOW}}}}}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{OBJECT[:-1]}</tool_call><tool_call>{NOW[:-2]}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call>{OBJECT[:-1]}\n{NOW}</tool_call>", "", BOTH),
    ("hermes", f"<tool_call><tool_call>{OBJECT}</tool_call><tool_call>{NOW}", "", BOTH),
    ("hermes", f"One <tool_call>{OBJECT} Two </tool_call> 3 <tool_call>{NOW}</tool_call> 4",
     "One Two  3 4", BOTH),
    ("hermes", f"<tool_call>{OBJECT}</tool_call> </tool_call>", "</tool_call>", LOOKED),
    ("hermes", f"<tool_call>{OBJECT} and {NOW}", f"and {NOW}", LOOKED),
    ("hermes", f'<tool_call>{OBJECT[:-1]}, "arguments": {{"x": 1}}}}</tool_call>', "", LOOKED),
    ("hermes", "<tool_call>{'arguments': {'where': 'a'}, 'name': 'look'}</tool_call>", "", LOOKED),
    ("hermes", "<tool_call>{answer: 5}</tool_call>", "<tool_call>{answer: 5}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}',
     []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("llama3_json", f"{OBJECT}{NOW}", "", BOTH),
    ("llama3_json", f"{OBJECT},{NOW}", "", BOTH),
    ("llama3_json", f"{OBJECT}<|python_tag|>{NOW}", "", BOTH),
    ("llama3_json", f"<|python_tag|>{OBJECT[:-1]}<|python_tag|>{NOW}", "", BOTH),
    ("llama3_json", f"{OBJECT}}};{NOW} Done.", "Done.", BOTH),
    ("llama3_json", "{x | x > 0} is a set", "{x | x > 0} is a set", []),
    ("mistral", f"[TOOL_CALLS][{OBJECT}][TOOL_CALLS][{NOW}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS][{OBJECT}[TOOL_CALLS][{NOW}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS][{OBJECT}{NOW}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS]{OBJECT}[TOOL_CALLS]{NOW}", "", BOTH),
    ("mistral", f"[TOOL_CALLS][{OBJECT}] then [TOOL_CALLS][{NOW}", "then", BOTH),
    ("mistral", f"[TOOL_CALLS][{OBJECT}]] Done", "Done", LOOKED),
    ("mistral", '[TOOL_CALLS]look[ARGS]{"where": "a"}now[ARGS]{}', "", BOTH),
    ("mistral", '[TOOL_CALLS]look{"where": "a"[TOOL_CALLS]now{}', "", BOTH),
    ("mistral", '[TOOL_CALLS]look{"where": "a"}} [TOOL_CALLS]now', "", BOTH),
    ("mistral", '[TOOL_CALLS]look{"where": "a"} looks', "looks", LOOKED),
    ("mistral", "[TOOL_CALLS]now[ARGS]", "", CALLED_NOW),
    ("mistral", "[TOOL_CALLS]now[TOOL_CALLS]now[ARGS]", "", CALLED_NOW * 2),
    ("mistral", "[TOOL_CALLS] nowhere", "[TOOL_CALLS] nowhere", []),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "Hi [TOOL_CALLS][", "Hi [TOOL_CALLS][", []),
    ("mistral", '[TOOL_CALLS][{"name": "x"}]', '[TOOL_CALLS][{"name": "x"}]', []),
    ("deepseek_v31", '[call_begin]look[sep]{"where": "a"}[call_begin]now[sep]{}', "", BOTH),
    ("deepseek_v31", '[calls_begin][call_begin]look[sep]{"where": "a"[call_end][call_begin]now[sep]'
     "[call_end][calls_end]", "", BOTH),
    ("deepseek_v31", "[calls_begin][call_begin]now[sep][call_end][calls_end]", "", CALLED_NOW),
    ("deepseek_v31", "[calls_begin][call_begin]now[sep]", "", CALLED_NOW),
    ("deepseek_v31", "[calls_begin][call_begin]now[sep]{}[call_end][calls_end]Hi", "Hi",
     CALLED_NOW),
    ("deepseek_v31", "[calls_begin][call_begin]now[sep]```json\n{}\n```[call_end]", "", CALLED_NOW),
    ("deepseek_v31", "[calls_begin]\nHi", "[calls_begin]\nHi", []),
    ("deepseek_v31", "[calls_begin]\n", "[calls_begin]\n", []),
    ("deepseek_v31", "[calls_begin][call_begin]now[sep]{} Hi [call_end][call_begin]look[sep]"
     '{"where": "a"}', "Hi", [*CALLED_NOW, *LOOKED]),
    ("deepseek_v3", "[calls_begin][call_begin]function[sep]now\n```json\n\n```[call_end]", "",
     CALLED_NOW),
    ("deepseek_v3", "[calls_begin][call_begin]function[sep]now[call_end]", "", CALLED_NOW),
    ("openai", channel('{"where": "a"}') + channel("", "now"), "", BOTH),
    ("openai", channel('{"where": "a"').removesuffix("<|call|>") + channel("{}", "now"), "", BOTH),
    ("openai", channel('{"where": "a"} so'), "so", LOOKED),
    ("openai", channel("so"), "so", []),
    ("gemma4", gemma("{where:#a#}").removesuffix("<tool_call|>"), "", LOOKED),
    ("gemma4", gemma("{where:#a#}").removesuffix("}<tool_call|>"), "", LOOKED),
    ("gemma4", gemma("{where:#a").removesuffix("<tool_call|>"), "", LOOKED),
    ("gemma4", gemma("{where:#a#") + gemma("{}", "now"), "", BOTH),
    ("gemma4", gemma("{where:#a#}").replace("<tool_call|>", "<|tool_call>call:now"), "", BOTH),
    ("gemma4", gemma("{where:#a#}").replace("call:", " call: "), "", LOOKED),
    ("gemma4", gemma("{where:#a#}").replace("call:", ""), "", LOOKED),
    ("gemma4", gemma("{#where#:#a#,}"), "", LOOKED),
    ("gemma4", gemma("{where:a}"), "", LOOKED),
    ("gemma4", gemma("{tags:[#x#,#y#],count:5,}"), "",
     [("look", {"tags": ["x", "y"], "count": 5})]),
    ("gemma4", gemma("{where:#a\n<|b <|tool_call>#}"), "",
     [("look", {"where": "a\n<|b <|tool_call>"})]),
    ("gemma4", gemma("{}", "nowhere"), gemma("{}", "nowhere"), []),
    ("gemma4", "Write <|tool_call> or <|tool", "Write <|tool_call> or <|tool", []),
    ("lfm2", "<|tool_call_start|>[look(where='a')]<|tool_call_start|>[now()]", "", BOTH),
    ("lfm2", "So. <|tool_call_start|> [now()] <|tool_call_end|>", "So.", CALLED_NOW),
    ("pythonic", "[look(where='a')]\n[now()]", "", BOTH),
    ("pythonic", "[look(where='a') now()]", "", BOTH),
    ("pythonic", "[look(where='a'), now(", "", BOTH),
    ("pythonic", "[look(where='a'), now(]", "", BOTH),
    ("pythonic", "[look(tags=[1]] Done", "Done", [("look", {"tags": [1]})]),
    ("pythonic", "[look(where='a')], [now()]", ", [now()]", LOOKED),
    ("llama4_pythonic", "<|python_start|>[now()]<|python_end|>", "", CALLED_NOW),
    # Marks of elements.
    ("qwen3_coder", LINES + "<parameter=where>\na\n<parameter=count>\n5\n</function>\n</tool_call>",
     "", [("look", {"where": "a", "count": 5})]),
    ("qwen3_coder", LINES + "<parameter=count>5<parameter=where>a</function></tool_call>",
     "", [("look", {"where": "a", "count": 5})]),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</function>\n</tool_call>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</function>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</tool_call>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</parameter>\n</tool_call>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</parameter>\n</function>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</parameter>", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=where>\na", "", LOOKED),
    ("qwen3_coder", LINES + "<parameter=count>\n5", "", [("look", {"count": 5})]),
    ("qwen3_coder", "<tool_call>\n<function=now>", "", CALLED_NOW),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>", "", CALLED_NOW),
    ("qwen3_coder", "Yes. " + qwen(where="a").removeprefix("<tool_call>\n"), "Yes.", LOOKED),
    ("qwen3_coder", "<function=look><parameter=where>a</parameter></function>"
     "<function=now></function>", "", BOTH),
    ("qwen3_coder", LINES + "<parameter=where>\na\n<tool_call>\n<function=now>\n</function>", "",
     BOTH),
    ("qwen3_coder", qwen(where="a").removesuffix("\n</tool_call>") + "<function=now></function>",
     "", BOTH),
    ("qwen3_coder", LINES + "<parameter=where>\na\n</parameter>\n<tool_call><function=now>", "",
     BOTH),
    ("qwen3_coder", qwen(where="<b></function> <parameter=x> </b>"), "",
     [("look", {"where": "<b></function> <parameter=x> </b>"})]),
    ("qwen3_coder", qwen(where="a").replace("</function>", "</parameter> so </function>"), "so",
     LOOKED),
    ("qwen3_coder", "Write <function=x> or <function", "Write <function=x> or <function", []),
    ("qwen3_xml", LINES + "<parameter=where>\na", "", LOOKED),
    ("glm45", glm(where="a").replace("</arg_value>\n", ""), "", LOOKED),
    ("glm45", glm(where="a", count="5").replace("</arg_value>\n", ""), "",
     [("look", {"where": "a", "count": 5})]),
    ("glm45", glm(where="a").replace("</arg_key>\n", ""), "", LOOKED),
    ("glm45", glm(where="a").replace("\n<arg_value>", ""), "", LOOKED),
    ("glm45", glm(where="a").removesuffix("</tool_call>"), "", LOOKED),
    ("glm45", glm(where="a").removesuffix("</arg_value>\n</tool_call>"), "", LOOKED),
    ("glm45", glm(where="a").replace("</tool_call>", "<tool_call>now</tool_call>"), "", BOTH),
    ("glm45", glm(where="a").removesuffix("</arg_value>\n</tool_call>") + "<tool_call>now\n", "",
     BOTH),
    ("glm45", "<tool_call>now", "", CALLED_NOW),
    ("glm45", "<tool_call><tool_call>now</tool_call>", "", CALLED_NOW),
    ("glm45", "<tool_call>nowhere", "<tool_call>nowhere", []),
]  # fmt: skip


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), TURNS)
def test_marks_that_are_missing_or_in_excess(
    tool_format: ToolCallFormat, text: str, content: str, calls: Calls
) -> None:
    check(tool_format, text, content, calls)


VALUES: list[tuple[str, str, object]] = [
    ("tags", "['x', 'y']", ["x", "y"]),
    ("tags", "[\n  'x',\n  \"y\",\n]", ["x", "y"]),
    ("tags", "('x', None)", ["x", None]),
    ("tags", f"['{PAIR}', '{HALF}']", [SMILE, LOST]),
    ("tags", f'["{HALF}", "{PAIR}"]', [LOST, SMILE]),
    ("tags", "['a\nb', '''it's''']", ["a\nb", "it's"]),
    ("tags", "\"['x']\"", ["x"]),
    ("tags", "[x]", "[x]"),
    ("tags", "[1, 2", "[1, 2"),
    ("tags", "[1], [2]", "[1], [2]"),
    ("tags", "null", None),
    ("filter", "{'k': True}", {"k": True}),
    ("filter", '{"k": None, "l": [False]}', {"k": None, "l": [False]}),
    ("filter", "{'k': {'l': (1, 2)}}", {"k": {"l": [1, 2]}}),
    ("filter", f"{{'{HALF}': '\\x41'}}", {LOST: "A"}),
    ("filter", f'{{"{HALF}": "{HALF}"}}', {LOST: LOST}),
    ("filter", "{'k': open('f')}", "{'k': open('f')}"),
    ("filter", "None", None),
    ("deep", "True", True),
    ("deep", "FALSE", False),
    ("deep", "yes", "yes"),
    ("count", "None", None),
    ("count", "0x10", 16),
    ("count", "1_000", 1000),
    ("count", "1e400", "1e400"),
    ("ratio", ".5", 0.5),
    ("ratio", "NaN", "NaN"),
    ("note", "None", None),
    ("note", "null", None),
    ("note", "True", "True"),
    ("note", f"x{HALF}", f"x{HALF}"),
    ("where", "['x']", "['x']"),
    ("where", "None", "None"),
    ("where", f"{HALF} 'a'", f"{HALF} 'a'"),
    ("either", "['x']", ["x"]),
    ("either", "x", "x"),
    ("any", "['x', {'k': None}]", ["x", {"k": None}]),
    ("any", "True", "True"),
    ("any", "x", "x"),
    ("other", "{'k': 1}", {"k": 1}),
]


@pytest.mark.parametrize("tool_format", ["qwen3_coder", "qwen3_xml", "glm45"])
@pytest.mark.parametrize(("key", "text", "value"), VALUES)
def test_values_of_elements_follow_the_schema(
    tool_format: ToolCallFormat, key: str, text: str, value: object
) -> None:
    write = glm if tool_format == "glm45" else qwen
    check(tool_format, write(**{key: text}), "", [("look", {key: value})])


@pytest.mark.parametrize("tool_format", ["qwen3_coder", "glm45"])
def test_deep_values_of_elements_can_be_sent_back(tool_format: ToolCallFormat) -> None:
    write = glm if tool_format == "glm45" else qwen
    text = write(any="[" * 250 + "]" * 250)
    _, [(_, given)] = read(turn_reader(tool_format, TOOLS, is_parallel=True), text)
    assert read_arguments(given, "") == from_json(given)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("qwen3_coder", "a\n</function>\n</tool_call>\n<parameter=count>\n<tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now>"),
        ("glm45", "a</tool_call><arg_key><tool_call>now\n"),
    ],
)
def test_strict_calls_have_all_marks(tool_format: ToolCallFormat, text: str) -> None:
    tool = Tool(name="look", parameters=LOOK, is_strict=True)
    reader = ToolUse([tool], ToolChoice(), tool_format=tool_format).reader()
    write = glm if tool_format == "glm45" else qwen
    _, [(_, given)] = read(reader, write(where=text, note="None"), random.Random(1))
    assert json.loads(given) == {"where": text, "note": "None"}


PYTHON: list[tuple[str, dict[str, Any] | None]] = [
    (f"where='smile {PAIR} {HALF} here'", {"where": f"smile {SMILE} {LOST} here"}),
    (
        r"where='\U0001f600 \x41 \101 \u00e4 \N{BULLET} \'\q'",
        {"where": "\U0001f600 A A \xe4 \u2022 '\\q"},
    ),
    ("where='a\nb'", {"where": "a\nb"}),
    ("\n  where='a',\n  deep=True,\n", {"where": "a", "deep": True}),
    ('where="""it\'s\n"a" b"""', {"where": 'it\'s\n"a" b'}),
    ("where='''it's'''", {"where": "it's"}),
    ("where='a' \"b\"", {"where": "ab"}),
    (r"where=r'\d\n', note=u'x'", {"where": r"\d\n", "note": "x"}),
    ("where='a\\\nb'", {"where": "ab"}),
    ("tags=(true, null)", {"tags": [True, None]}),
    ("tags=(true), any=(1,), either=()", {"tags": True, "any": [1], "either": []}),
    ("tags=[(1, 'x'), [None]]", {"tags": [[1, "x"], [None]]}),
    ("filter={'k': true, 1: [false]}", {"filter": {"k": True, "1": [False]}}),
    ("count=-5, ratio=+.5, any=0x1f", {"count": -5, "ratio": 0.5, "any": 31}),
    ("where='" + "a, ) " * 5000 + "'", {"where": "a, ) " * 5000}),
    ("class=1", {"class": 1}),
    ("where=open('f')", None),
    ("1, 2", None),
    ("*x", None),
    ("**{'a': 1}", None),
    ("where=f'x'", None),
    ("where=b'x'", None),
    ("count=1 + 1", None),
    ("count=1e400", None),
    ("filter={1, 2}", None),
]


@pytest.mark.parametrize("tool_format", ["pythonic", "llama4_pythonic"])
@pytest.mark.parametrize(("arguments", "expected"), PYTHON)
def test_literals_of_python_are_read(
    tool_format: ToolCallFormat, arguments: str, expected: dict[str, Any] | None
) -> None:
    text = f"[look({arguments})]"
    check(
        tool_format,
        text,
        "" if expected is not None else text,
        [] if expected is None else [("look", expected)],
    )


def test_valid_json_is_passed_on_as_it_is_written() -> None:
    given = '{ "a" : [1 , -2.5e+3,{"b":null , "c\\u00e4\\/":"\\ud83d\\ude00\\"" } ],"d":{}\n}'
    for end in range(len(given) + 1):
        reader, text = ObjectText(), given[:end]
        rest = text[reader.read_object(text) :] + given[end:]
        assert given.startswith(written := reader.take_text())
        assert reader.read_object(rest) == len(rest)
        assert written + reader.take_text() == given
        assert not reader.is_damaged


def written_turns() -> dict[str, list[str]]:
    """Return turns of every format and of forced calls, to be damaged."""
    found: dict[str, list[str]] = {}
    valid = rf'{{"where": "{PAIR} \u00e4", "tags": [1, {{"a": null}}]}}'
    # An object may have only so many characters before its name.
    objects = [valid, *(given for given, _ in JSON_ARGUMENTS if len(given) < 4000)]
    for arguments in objects:
        for tool_format, text in in_json(arguments):
            found.setdefault(tool_format, []).append(deepseek(text * 2))
    for tool_format, text, _, _ in TURNS:
        found.setdefault(tool_format, []).append(deepseek(text))
    for key, text, _ in VALUES:
        found.setdefault("glm45", []).append(glm(where="a") + glm(**{key: text}))
        for name in ("qwen3_coder", "qwen3_xml"):
            found.setdefault(name, []).append(qwen(where="a") + qwen(**{key: text}))
    for arguments, _ in PYTHON:
        for name in ("pythonic", "llama4_pythonic"):
            found.setdefault(name, []).append(f"[look({arguments}), now()]")
        calls = f"{LFM2_BEGIN}[look({arguments}), now()]{LFM2_END}"
        found.setdefault("lfm2", []).append(f"Yes. {calls} So. {calls}")
    found["choice"] = found["hermes"]
    return found | {"list": [f"[{OBJECT}, {NOW}]", *found["llama3_json"]], "named": objects}


WRITTEN = written_turns()
NOISE = (
    *("\\", '"', "'", '"""', "{", "}", "[", "]", "(", ")", ",", ":", "=", "\n", "\x00", "\x1f"),
    *("\\ud83d", "\\ude00", "\\u12", "\\x4", "null", "None", "True", "NaN", "1e999", "-", "\u2028"),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<function=now>"),
    *("<parameter=where>", "</parameter>", "</function>", "<arg_key>", "</arg_value>", "<", ">"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "call:now{", "call:", LFM2_BEGIN, LFM2_END),
    *("<|call|>", "<|end|>", "<|start|>", "<|message|>", " to=functions.now", "{}{", "look", "now"),
    *map(deepseek, ("[calls_begin]", "[call_begin]", "[call_end]", "[sep]")),
)


def damaged(text: str, generator: random.Random) -> str:
    """Return a text from which some was removed, repeated or replaced."""
    for _ in range(generator.choice((0, 1, 1, 2, 4))):
        place = generator.randrange(len(text) + 1)
        size = generator.choice((0, 1, 1, 2, 5, 12))
        inserted = generator.choice(("", generator.choice(NOISE), text[place : place + 8] * 2))
        text = text[:place] + inserted + text[place + size :]
    return text[: generator.randrange(len(text) + 1)] if generator.random() < 0.2 else text


def reader_of(name: str) -> TurnReader:
    if name == "list":
        return ListReader(TOOLS, is_parallel=True, has_short_ids=False)
    if name == "choice":
        return ChoiceReader(TOOLS, mark="<tool_call>", is_parallel=True, has_short_ids=False)
    if name == "named":
        return NamedReader({"look": LOOK}, is_parallel=False, has_short_ids=True)
    return turn_reader(name, TOOLS, is_parallel=True)  # type: ignore[arg-type]  # a format


@pytest.mark.parametrize("num_texts", [75, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*TOOL_CALL_FORMATS, "choice", "list", "named"])
def test_any_damage_gives_valid_calls(name: str, num_texts: int) -> None:
    generator = random.Random(name)
    for number in range(num_texts):
        text = damaged(generator.choice(WRITTEN[name]), generator)
        whole = read(reader_of(name), text)
        pieces = random.Random(number)
        assert read(reader_of(name), text, pieces) == whole, text
        for _, given in whole[1]:
            assert isinstance(json.loads(given), dict), text
            # Clients send it back, and encode it as UTF-8.
            assert read_arguments(given, "") == from_json(given.encode()), text
        content, cut = read(reader_of(name), text, is_cut_off=True)
        for _, given in cut:
            read_arguments(given, "")
            json.dumps(content).encode()
