"""Tool calls in the text of a model, in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.tools.tool_calls import (
    TOOL_CALL_FORMATS,
    list_reader,
    named_reader,
    turn_reader,
)
from tests.hostile.fuzz.target import Target

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import TurnDelta, TurnReader

_NAMES = ("look", "add")
_NUM_FORMATS = len(TOOL_CALL_FORMATS) + 2


def run(data: bytes) -> None:
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
        return turn_reader(TOOL_CALL_FORMATS[place], _NAMES, is_parallel=is_parallel)
    if place == len(TOOL_CALL_FORMATS):
        return list_reader(_NAMES, is_parallel=is_parallel, has_short_ids=False)
    return named_reader("look", has_short_ids=True)


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
    return content, calls


_CALL = b'{"name": "look", "arguments": {"where": "a } \\" b", "x": [1, {"y": 2}]}}'

TARGET = Target(
    run=run,
    seeds=(
        b"\x00\x02I look.\n<tool_call>\n" + _CALL + b"\n</tool_call> <tool_call>" + _CALL,
        b"\x01\x00<|python_tag|>" + _CALL + b"; " + _CALL,
        b"\x02\x04x [TOOL_CALLS][" + _CALL + b", " + _CALL + b"]",
        b"\x02\x01[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{}[TOOL_CALLS]add{}",
        b"\x03\x05[" + _CALL + b',{"parameters":"{}","name":"add"}]',
        b"\x04\x00{}",
    ),
    words=(
        *(b"<tool_call>", b"</tool_call>", b"<|python_tag|>", b"[TOOL_CALLS]", b"[ARGS]"),
        *(b'"name"', b'"arguments"', b'"parameters"', b'"look"', b'"add"', b"[CALL_ID]", b'\\"'),
    ),
)
