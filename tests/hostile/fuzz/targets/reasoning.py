"""Reasoning in the text of a model, in pieces."""

from __future__ import annotations

from cluster.serving.reasoning import ReasoningReader
from pagedray.reasoning import Reasoning
from tests.hostile.fuzz.target import Target

_MARKS = (
    ("<think>", "</think>"),
    ("Here is my thought process:", "Here is my response:"),
    ("[THINK]", "[/THINK]"),
)


def run(data: bytes) -> None:
    """Read the same from one piece as from small ones, whose length the second byte gives."""
    if len(data) < 2:
        return
    begin, end = _MARKS[data[0] % len(_MARKS)]
    reasoning = Reasoning(begin=begin, end=end, is_open=data[0] >= 128)
    text = data[2:].decode("utf-8", "replace")
    size = 1 + data[1] % 16
    pieces = [text[first : first + size] for first in range(0, len(text), size)]
    whole, parts = _read(reasoning, [text]), _read(reasoning, pieces or [""])
    assert whole == parts, f"{whole} from one piece, {parts} from pieces of {size}"
    # Nothing is invented, and only blanks and marks are left out.
    assert len(whole[0]) + len(whole[1]) <= len(text)
    assert whole[0] in text
    assert text.endswith(whole[1])


def _read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    """Return the reasoning and what follows it."""
    reader = ReasoningReader(reasoning)
    found = [
        reader.read_piece(piece, is_last=number == len(pieces))
        for number, piece in enumerate(pieces, 1)
    ]
    return "".join(one for one, _ in found), "".join(rest for _, rest in found)


TARGET = Target(
    run=run,
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
