"""Reasoning in generated text, read in pieces of any size."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serving.reasoning import ReasoningReader, detect_reasoning, reasoning_after
from pagedray.reasoning import Reasoning, ReasoningPlace, ReasoningTracker

MARKS = Reasoning(begin="<think>", end="</think>")
OPEN = Reasoning(begin="<think>", end="</think>", is_open=True)
PIECES = ("<think>", "</think>", "<", "</", "think>", "thi", "nk>", " ", "\n", "a", "b c", "é")


def read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    reader = ReasoningReader(reasoning)
    parts = [reader.read_piece(piece) for piece in pieces] + [reader.read_piece("", is_last=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def expected_of(text: str, *, is_open: bool) -> tuple[str, str]:
    """Return the same from the whole text, by an expression."""
    found = re.fullmatch(r"(?s)[ \t\r\n]{0,16}<think>(.*)", text)
    if found is None and not is_open:
        return "", text
    inside, _, rest = (text if found is None else found[1]).partition("</think>")
    return inside.strip(" \t\r\n"), rest.lstrip(" \t\r\n")


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), is_open=st.booleans())
def test_pieces_are_read_as_the_whole(pieces: list[str], is_open: bool) -> None:
    reasoning = OPEN if is_open else MARKS
    text = "".join(pieces)
    assert read(reasoning, pieces) == expected_of(text, is_open=is_open)
    assert read(reasoning, list(text)) == expected_of(text, is_open=is_open)


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), is_open=st.booleans())
def test_tokens_are_followed_as_the_text(pieces: list[str], is_open: bool) -> None:
    reasoning = OPEN if is_open else MARKS
    reader, tracker = ReasoningReader(reasoning), ReasoningTracker(reasoning)
    for piece in pieces:
        reader.read_piece(piece)
        tracker.add_token(0, piece.encode())
        if not (is_open and reader.place is ReasoningPlace.INSIDE):
            assert tracker.place is reader.place


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    reader = ReasoningReader(MARKS)
    steps = [
        ("\n<th", ("", "")), ("ink>\n", ("", "")), ("One <", ("One", "")), ("b", (" <b", "")),
        (" two </thin", (" two", "")), ("k>\n\n", ("", "")), ("An", ("", "An")), (" <", ("", " <")),
    ]  # fmt: skip
    for piece, found in steps:
        assert reader.read_piece(piece) == found
    reader = ReasoningReader(MARKS)
    assert [reader.read_piece(piece) for piece in (" <th", "e> x")] == [("", ""), ("", " <the> x")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "qwen3"),
        ("{% if '</think>' in content %}", "qwen3"),
        ("{{ '[THINK]' }}", "mistral"),
        ("after 'Here is my thought process:' and", "granite"),
        ("{{ '<seed:think>' }}", "seed_oss"),
        ("{{ messages }}", "none"),
        ("", "none"),
    ],
)
def test_format_is_found_in_the_template(template: str, name: str) -> None:
    assert detect_reasoning(template) == name


@pytest.mark.parametrize(
    ("end", "is_open", "is_always_open"),
    [
        ("<|assistant|>", False, True),
        ("<|assistant|><think>\n", True, True),
        ("<|assistant|><think>\n\n</think>\n\n", None, None),
        ("say <think><|assistant|>", False, True),
    ],
)
def test_prompt_decides_whether_a_turn_begins_inside(
    end: str, is_open: bool | None, is_always_open: bool | None
) -> None:
    for reasoning, expected in ((MARKS, is_open), (OPEN, is_always_open)):
        found = reasoning_after(reasoning, end)
        assert (None if found is None else found.is_open) is expected
