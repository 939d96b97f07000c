"""Tool calls and turns of gpt-oss in generated text, parsed in pieces of any size."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.channel_reader import ChannelReader, ChannelTexts, ChannelTokens
from cluster.serving.tools.json_calls import ListReader, NamedReader
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import ToolCallFormat, detect_format, turn_reader
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import AnswerHeader, FinishReason, Reasoning, ReasoningPlace, ReasoningTracker

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
    "gemma4": (
        "gemma4",
        'I look.<|tool_call>call:look{deep:true,where:<|"|>a "b" \\n {<|"|>}<tool_call|>'
        '<|tool_call>call:add{x:-1.5,y:[1,{k:null,l:<|"|>}]<|"|>}],z:{}}<tool_call|>',
        "I look.",
        [
            ("look", '{"deep":true,"where":"a \\"b\\" \\\\n {"}'),
            ("add", '{"x":-1.5,"y":[1,{"k":null,"l":"}]"}],"z":{}}'),
        ],
    ),
    "gemma4, no arguments": (
        "gemma4",
        "<|tool_call>call:look{}<tool_call|><|tool_call>call:add<tool_call|> Then.",
        "Then.",
        [("look", "{}"), ("add", "{}")],
    ),
    "gemma4, line feeds": (
        "gemma4",
        '<|tool_call>call:look{where:<|"|>a\n\t<|b <<|"|>}<tool_call|>',
        "",
        [("look", '{"where":"a\\n\\t<|b <"}')],
    ),
    "gemma4, JSON": (
        "gemma4",
        '<|tool_call>call:look{"where": "a<|\\"b"}<tool_call|>',
        "",
        [("look", '{"where": "a<|\\"b"}')],
    ),
    "gemma4, unknown tool": (
        "gemma4",
        "<|tool_call>call:drop{}<tool_call|>",
        "<|tool_call>call:drop{}<tool_call|>",
        [],
    ),
    "gemma4, cut off": (
        "gemma4",
        '<|tool_call>call:look{where:<|"|>he',
        "",
        [("look", '{"where":"he')],
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
    "lfm2": (
        "lfm2",
        "I look.\n<|tool_call_start|>[look(where='a, ) <|tool_call_end|>'), add(x=-2.5)]"
        "<|tool_call_end|> Then.<|tool_call_start|>[look()]<|tool_call_end|>Done.",
        "I look. Then.Done.",
        [
            ("look", '{"where": "a, ) <|tool_call_end|>"}'),
            ("add", '{"x": -2.5}'),
            ("look", "{}"),
        ],
    ),
    "lfm2, unknown tool": (
        "lfm2",
        "a <|tool_call_start|>[drop(x=1)]<|tool_call_end|>",
        "a <|tool_call_start|>[drop(x=1)]<|tool_call_end|>",
        [],
    ),
    "lfm2, a list": ("lfm2", "[look()] <|tool_call_st", "[look()] <|tool_call_st", []),
    "lfm2, cut off": (
        "lfm2",
        "<|tool_call_start|>[look(where='a",
        "<|tool_call_start|>[look(where='a",
        [],
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
    "gemma4": "<|tool_call>call:add{x:1}<tool_call|>" * 4,
    "pythonic": "[add(x=1), add(x=1), add(x=1), add(x=1)]",
    "lfm2": "<|tool_call_start|>[add(x=1), add(x=1)]<|tool_call_end|>\n" * 2,
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
        ('<|im_start|>{% if tools %}{{ "List of tools: [" }}{% endif %}', "lfm2"),
        ("{% if tools %}<|tool_call_start|>{% endif %}", "lfm2"),
        (
            deepseek("{% if tools %}[calls_begin]{% endif %}"),
            "deepseek_v3",
        ),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|tool_call>call:{% endif %}", "gemma4"),
        ("{% if tools %}call them{% endif %}", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_format_is_found_in_the_template(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected


TRANSCRIPTS: list[dict[str, Any]] = json.loads(  # Any: JSON
    Path(__file__).with_name("harmony_transcripts.json").read_text()
)
SCHEMAS: dict[str, dict[str, object]] = {"look": {}, "add": {}}
CHANNEL_TOOLS = [Tool(name=name, parameters={}) for name in SCHEMAS]
MARKS = Reasoning(
    begin="<|channel|>analysis<|message|>", end="<|end|>", answer_headers=(AnswerHeader((1,)),)
)
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


class CharacterTokens:
    """A vocabulary whose tokens are characters."""

    def bytes_of(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def split(text: str, generator: random.Random) -> list[str]:
    """Return the text in pieces of random lengths."""
    pieces: list[str] = []
    while text:
        length = generator.randint(1, 12)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def channel_read(reader: ChannelReader, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    """Return reasoning, content and calls."""
    reasoning = content = ""
    calls: list[list[str]] = []
    for delta in [*map(reader.read_piece, pieces), reader.flush()]:
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return reasoning, content, calls


def expected(messages: list[dict[str, Any]]) -> tuple[str, str, list[list[str]]]:
    """Return what the messages of OpenAI's reader are here."""
    calls = [
        [one["recipient"].removeprefix("functions."), one["content"]]
        for one in messages
        if one["recipient"] is not None
    ]
    others = [one for one in messages if one["recipient"] is None]
    return (
        "\n".join(one["content"] for one in others if one["channel"] == "analysis"),
        "".join(one["content"] for one in others if one["channel"] != "analysis"),
        calls,
    )


@pytest.mark.parametrize("seed", range(4))
def test_turns_are_those_of_openai_harmony(seed: int) -> None:
    generator = random.Random(seed)
    for transcript in TRANSCRIPTS:
        pieces = split(transcript["text"], generator)
        assert channel_read(ChannelReader(SCHEMAS), pieces) == expected(transcript["messages"])


CASES = [
    ("<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    # A model that knows no channels.
    ("Hi <b>.", ("", "Hi <b>.", [])),
    # A function that the request does not have, and what is no object.
    ("<|channel|>commentary to=functions.x json<|message|>{}<|call|>",
     ("", "<|channel|>commentary to=functions.x json<|message|>{}", [])),
    ("<|channel|>commentary to=functions.add<|message|>[1]<|call|>", ("", "[1]", [])),
    ("<|channel|>commentary to=functions.add<|message|><|call|>", ("", "", [["add", "{}"]])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a\": 1} and",
     ("", "and", [["add", '{"a": 1}']])),
    # A tool of the model's own, which it uses while it reasons.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    # Cut off inside of a header, and an object without its end.
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", ("Hm.", "", [])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a", ("", "", [["add", '{"a": null}']])),
    ("<|channel|>" + "x" * 600, ("", "<|channel|>" + "x" * 600, [])),
    ("to=functions.add<|channel|>comm", ("", "", [])),
    ("<|channel|>final<|message|>Hi.<|end|>\n<|sta", ("", "Hi.", [])),
    # Marks in texts, and what follows one without a header.
    ("<|channel|>final<|message|>The token <|end|> closes a message.",
     ("", "The token <|end|> closes a message.", [])),
    ("<|channel|>final<|message|><|start|> opens it, <|end|> and <|return|> close it.",
     ("", "<|start|> opens it, <|end|> and <|return|> close it.", [])),
    ("<|channel|>final<|message|>Not <|end|><|start|>this is no header, is it?",
     ("", "Not <|end|><|start|>this is no header, is it?", [])),
    ("<|start|> opens a message.", ("", "<|start|> opens a message.", [])),
    ("<|channel|>analysis<|message|>Hm.<|end|>The answer is 4.", ("Hm.", "The answer is 4.", [])),
    ("<|channel|>commentary to=functions.add<|message|>{}<|call|>Now.",
     ("", "Now.", [["add", "{}"]])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a\": \"'<|end|>' <|start|>\"}<|call|>",
     ("", "", [["add", "{\"a\": \"'<|end|>' <|start|>\"}"]])),
    # What follows a call after reasoning, which ends at fewer marks.
    (f"{ANSWER.removesuffix('<|channel|>final<|message|>')} to=functions.add<|message|>{{}}"
     "<|call|><|start|>assistant<|channel|>final<|message|>Hi.", ("Hm.", "Hi.", [["add", "{}"]])),
    ("to=be, or not to=be", ("", "to=be, or not to=be", [])),
    ("Hm.<|end|>to=functions.add<|message|>{}",
     ("", "Hm.<|end|>to=functions.add<|message|>{}", [])),
    # Blanks before a mark, as many as where a grammar waits for it, and more.
    (" " * 16 + "<|channel|>final<|message|>Hi.", ("", "Hi.", [])),
    (" " * 17 + "<|channel|>final", ("", " " * 17 + "<|channel|>final", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), CASES)
def test_other_turns(text: str, found: tuple[str, str, list[list[str]]]) -> None:
    assert channel_read(ChannelReader(SCHEMAS), [text]) == found
    assert channel_read(ChannelReader(SCHEMAS), list(text)) == found


@pytest.mark.parametrize("inside", ["<|start|>", "<|call|>", "<|return|>"])
def test_reasoning_ends_where_grammars_begin(inside: str) -> None:
    text = f"<|channel|>analysis<|message|>Hm. {inside}assistant<|channel|>final<|message|>Free."
    tracker = ReasoningTracker(MARKS)
    for character in text:
        tracker.add_token(ord(character), character.encode())
    assert tracker.place is ReasoningPlace.INSIDE
    thoughts = text.removeprefix(MARKS.begin)
    assert channel_read(ChannelReader(SCHEMAS), list(text)) == (thoughts, "", [])
    answer = "<|end|><|start|>assistant<|channel|>final<|message|>{}"
    assert channel_read(ChannelReader(SCHEMAS), list(text + answer)) == (thoughts, "{}", [])


def test_calls_without_arguments_need_no_mark() -> None:
    text = "<|channel|>commentary to=functions.add<|message|>"
    assert turn_of(ToolChoice(), text)[:3] == ("", "", [["add", "{}"]])
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):
        assert turn_of(ToolChoice(), text, reason)[:3] == ("", "", [])
    cut = text.removesuffix("<|message|>")
    assert turn_of(ToolChoice(), cut)[:3] == ("", "", [])


def turn_of(
    choice: ToolChoice, text: str, reason: FinishReason = FinishReason.STOP
) -> tuple[str, str, list[list[str]], int]:
    """Return reasoning, content, calls and the number of reasoning tokens of a turn."""
    use = ToolUse(CHANNEL_TOOLS, choice, tool_format="openai")
    turns = Turns(use, MARKS, CharacterTokens())  # type: ignore[arg-type]  # its only method
    turn = turns.begin_turn()
    delta = turn.read(
        SequenceOutput(
            index=0,
            text=text,
            token_ids=tuple(map(ord, text)),
            finish_reason=reason,
        )
    )
    calls: list[list[str]] = []
    for call in delta.calls:
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    assert turn.has_calls == bool(calls)
    return delta.reasoning, delta.content, calls, turns.num_reasoning_tokens


def reasoning_tokens(text: str, size: int, *, is_open: bool = False) -> int:
    """Return the count of a turn whose tokens are its marks, and `size` characters elsewhere."""
    counter = ChannelTokens(SCHEMAS, is_open=is_open)
    for part in re.split(r"(<\|\w+\|>)", text):
        is_mark = part.startswith("<|")
        for place in range(0, len(part), len(part) if is_mark else size):
            counter.add_token(part[place : place + (len(part) if is_mark else size)].encode())
    return counter.num_reasoning


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
COUNTED = [
    # Three marks, eight characters of the channel's name, and the text.
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hm. analysis", 14),
    (f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final", 28),
    (f"{THOUGHT}<|start|>assistant{THOUGHT}", 28),
    (f"to=python{THOUGHT.replace('<|end|>', '<|call|>')}", 14),
    ("<|channel|>analysis to=python code<|message|>1<|return|>Yes.", 27),
    # A call while it reasons is none of it.
    ("<|channel|>analysis to=functions.add<|message|>{}<|call|>", 0),
    ("<|channel|>analysis<|message|>a<|start|>b<|call|>c<|end|>d", 16),
    (f"Text <|start|> {THOUGHT}", 0),
    ("<|channel|>analysis", 0),
    ("<|channel|>final<|message|>Yes.<|end|>", 0),
    ("Yes.", 0),
]


@pytest.mark.parametrize(("text", "number"), COUNTED)
def test_tokens_of_every_message_of_reasoning_count(text: str, number: int) -> None:
    assert reasoning_tokens(text, 1) == number


def test_count_does_not_depend_on_where_tokens_end() -> None:
    text = f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final"
    # Three marks, the channel's name in one or two tokens, and the text in one.
    assert reasoning_tokens(text, 100) == 10
    assert reasoning_tokens(text, 4) == 12


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_as_reasoning_is_counted(seed: int) -> None:
    for transcript in TRANSCRIPTS:
        text = transcript["text"]
        messages = [one["content"] for one in transcript["messages"]
                    if one["channel"] == "analysis" and one["recipient"] is None]  # fmt: skip
        counted = reasoning_tokens(text, 1 + seed)
        least = sum(math.ceil(len(one) / (1 + seed)) for one in messages)
        assert least <= counted <= least + (3 + 8) * len(messages)


def test_prompt_may_begin_a_message_of_reasoning() -> None:
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    assert channel_read(ChannelReader(SCHEMAS, is_open=True), list(text)) == ("Hm.", "Hi.", [])
    assert reasoning_tokens(text, 1, is_open=True) == 4


CHANNEL_CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
)


def test_forced_calls_are_messages_of_their_own() -> None:
    named = ToolChoice(kind="named", name="add")
    found = turn_of(named, THOUGHT + CHANNEL_CALL.format("add", '{"a": 1}'))
    assert found == ("Hm.", "", [["add", '{"a": 1}']], len(THOUGHT))
    found = turn_of(ToolChoice(kind="required"), THOUGHT + CHANNEL_CALL.format("look", "{}"))
    assert found == ("Hm.", "", [["look", "{}"]], len(THOUGHT))
    answered = turn_of(ToolChoice(kind="none"), f"{ANSWER}Hi.")
    assert answered == ("Hm.", "Hi.", [], len(THOUGHT))


def test_usage_counts_every_message_of_reasoning() -> None:
    text = f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final"
    found = turn_of(ToolChoice(), f"{text}<|message|>Hi.")
    assert found == ("Hm.\nHm.", "I look.Hi.", [], 2 * len(THOUGHT))


def test_texts_of_channels_join() -> None:
    texts = ChannelTexts()
    found = [texts.read_piece(one, is_last=False) for one in f"{ANSWER}Hi."]
    found.append(texts.read_piece("", is_last=True))
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == ("Hm.", "Hi.")
