"""Reasoning and tool calls in the text of a model, in pieces."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cluster.serving.reasoning import ReasoningReader
from cluster.serving.tools.json_calls import ListReader, NamedReader
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS, turn_reader
from pagedray.request import Reasoning
from tests.hostile.fuzz.target import Target

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import TurnDelta, TurnReader

_TOOLS: dict[str, dict[str, object]] = {
    "look": {"properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
    "add": {"properties": {"x": {"type": "number"}, "y": True}},
}
_NUM_FORMATS = len(TOOL_CALL_FORMATS) + 2


def run_tool_calls(data: bytes) -> None:
    """Read the same from one piece as from small ones, whose length the second byte gives."""
    if len(data) < 2:
        return
    text = data[2:].decode("utf-8", "replace")
    size = 1 + data[1] % 16
    pieces = [text[first : first + size] for first in range(0, len(text), size)]
    whole, parts = _read(_reader(data[0]), [text]), _read(_reader(data[0]), pieces)
    assert whole == parts, f"{whole} from one piece, {parts} from pieces of {size}"


def _reader(number: int) -> TurnReader:
    place, is_parallel = number % _NUM_FORMATS, number < 128
    if place < len(TOOL_CALL_FORMATS):
        return turn_reader(TOOL_CALL_FORMATS[place], _TOOLS, is_parallel=is_parallel)
    if place == len(TOOL_CALL_FORMATS):
        return ListReader(_TOOLS, is_parallel=is_parallel, has_short_ids=False)
    return NamedReader({"look": {}}, is_parallel=False, has_short_ids=True)


def _read(reader: TurnReader, pieces: list[str]) -> tuple[str, dict[int, list[str]]]:
    """Return the content, and name and arguments of each call."""
    content = ""
    calls: dict[int, list[str]] = {}

    def add(delta: TurnDelta) -> None:
        nonlocal content
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index not in calls, "a call began twice"
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments

    for piece in pieces:
        add(reader.read_piece(piece))
    add(reader.flush())
    for name, arguments in calls.values():
        assert isinstance(json.loads(arguments), dict), f"{name} has {arguments}"
    return content, calls


_CALL = b'{"name": "look", "arguments": {"where": "a } \\" b", "x": [1, {"y": 2}]}}'
_DEEPSEEK = {
    name: f"<\uff5ctool\u2581{name}\uff5c>".encode()
    for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
}
_QWEN_CALL = (
    b"<tool_call>\n<function=look>\n<parameter=where>\na </b>\n</parameter>\n"
    b"<parameter=deep>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
_GLM_CALL = (
    b"<tool_call>look\n<arg_key>where</arg_key>\n<arg_value>a <b></arg_value>\n"
    b"<arg_key>deep</arg_key><arg_value>false</arg_value>\n</tool_call>"
)
_GEMMA_CALL = b'<|tool_call>call:look{where:<|"|>a <b><|"|>,y:[1,{k:null}]}<tool_call|>'
_DEEPSEEK_CALL = (
    _DEEPSEEK["call\u2581begin"]
    + b"function"
    + _DEEPSEEK["sep"]
    + b'look\n```json\n{"where": "}"}\n```'
    + _DEEPSEEK["call\u2581end"]
)


def _seed(name: str, size: int, text: bytes) -> bytes:
    """Return an input for a format, or for one of the readers of forced calls."""
    names = (*TOOL_CALL_FORMATS, "list", "named")
    return bytes((names.index(name), size)) + text


TOOL_CALLS = Target(
    run=run_tool_calls,
    seeds=(
        _seed(
            "hermes", 2, b"I look.\n<tool_call>\n" + _CALL + b"\n</tool_call> <tool_call>" + _CALL
        ),
        _seed("llama3_json", 0, b"<|python_tag|>" + _CALL + b"; " + _CALL),
        _seed("mistral", 4, b"x [TOOL_CALLS][" + _CALL + b", " + _CALL + b"]"),
        _seed("mistral", 1, b"[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]add{}"),
        _seed("qwen3_coder", 3, b"I look. " + _QWEN_CALL + b"\n" + _QWEN_CALL + b" done"),
        _seed("glm45", 3, b"\n" + _GLM_CALL + b"\n" + _GLM_CALL),
        _seed("gemma4", 2, b"I look." + _GEMMA_CALL + _GEMMA_CALL),
        _seed("lfm2", 2, b"I look.<|tool_call_start|>[look(x=1)]<|tool_call_end|> Done."),
        _seed("pythonic", 2, b'[look(where="a, ) \\" b", deep=True), add(y=[1, {"k": None}])]'),
        _seed(
            "deepseek_v3",
            5,
            _DEEPSEEK["calls\u2581begin"]
            + _DEEPSEEK_CALL * 2
            + _DEEPSEEK["calls\u2581end"]
            + b" x",
        ),
        _seed(
            "openai",
            3,
            b"<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
            b'to=functions.look <|constrain|>json<|message|>{"where": "a } b"}<|call|>',
        ),
        _seed(
            "openai",
            7,
            b"<|start|>assistant to=functions.add<|channel|>commentary<|message|>{}<|call|>"
            b"<|channel|>final<|message|>done<|return|>",
        ),
        _seed("list", 5, b"[" + _CALL + b',{"parameters":"{}","name":"add"}]'),
        _seed("named", 0, b"{}"),
    ),
    words=(
        *(b"<tool_call>", b"</tool_call>", b"<|python_tag|>", b"[TOOL_CALLS]", b"[ARGS]"),
        *(b'"name"', b'"arguments"', b'"parameters"', b'"look"', b'"add"', b"[CALL_ID]", b'\\"'),
        *(b"<function=look>", b"</function>", b"<parameter=where>", b"</parameter>", b"look"),
        *(
            b"<|tool_call_start|>",
            b"<|tool_call_end|>",
            b"<|tool_call>",
            b"<tool_call|>",
            b'<|"|>',
            b"call:look{",
        ),
        *(b"<arg_key>", b"</arg_key>", b"<arg_value>", b"</arg_value>", b"[look(", b"x=1", b")]"),
        *(b"<|channel|>", b"<|message|>", b"<|start|>", b"<|end|>", b"<|call|>", b"<|return|>"),
        *(b"analysis", b"commentary", b"final", b" to=functions.look", b"<|constrain|>json"),
        *(b"'", b'"""', b"\\ud83d", b"\\ude00", b"null", b"None", b"True", b"NaN", b"1e999", b"\n"),
        *_DEEPSEEK.values(),
    ),
)


_MARKS = (
    ("<think>", "</think>"),
    ("Here is my thought process:", "Here is my response:"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)


def run_reasoning(data: bytes) -> None:
    """Read the same from one piece as from small ones, whose length the second byte gives."""
    if len(data) < 2:
        return
    begin, end = _MARKS[data[0] % len(_MARKS)]
    reasoning = Reasoning(begin=begin, end=end, is_open=data[0] >= 128)
    text = data[2:].decode("utf-8", "replace")
    size = 1 + data[1] % 16
    pieces = [text[first : first + size] for first in range(0, len(text), size)]
    whole, parts = _reasoning_read(reasoning, [text]), _reasoning_read(reasoning, pieces or [""])
    assert whole == parts, f"{whole} from one piece, {parts} from pieces of {size}"
    # Nothing is invented, and only blanks and marks are left out.
    assert len(whole[0]) + len(whole[1]) <= len(text)
    assert whole[0] in text
    assert text.endswith(whole[1])


def _reasoning_read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    """Return the reasoning and what follows it."""
    reader = ReasoningReader(reasoning)
    found = [
        reader.read_piece(piece, is_last=number == len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]
    return "".join(one for one, _ in found), "".join(rest for _, rest in found)


REASONING = Target(
    run=run_reasoning,
    seeds=(
        b"\x00\x02<think>\nI look.\n</think>\n\nYes.",
        b"\x81\x03\n Here is my thought process: a  b Here is my response: c",
        b"\x80\x01so</think>",
        b"\x02\x00x [THINK]y[/THINK]",
        b"\x00\x05\n\n<think></think> ",
    ),
    words=(*(mark.encode() for marks in _MARKS for mark in marks), b"\n\n", b"</", b" "),
    max_bytes=512,
)
