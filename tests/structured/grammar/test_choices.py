"""Choices are a list of texts, each of which can be generated."""

from __future__ import annotations

import json

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure

MOST = 1024


def choices(*texts: object) -> Structure:
    return Structure(kind="choice", text=json.dumps(texts))


def test_each_choice_is_accepted_and_no_other_text() -> None:
    given = ("a", "ab", "a", '"\\\n', "\N{SNOWMAN}\ue000\ud7ff")
    grammar = xgrammar.Grammar.from_ebnf(grammar_text(choices(*given)))
    for text in given:
        assert _is_grammar_accept_string(grammar, text)
    for text in ("", "b", "aa", "aab", '"', "\N{SNOWMAN}"):
        assert not _is_grammar_accept_string(grammar, text)


def test_as_many_choices_as_allowed_are_accepted() -> None:
    assert grammar_text(choices(*map(str, range(MOST))))


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (choices(), "must have 1 to 1024 non-empty choices"),
        (choices("a", ""), "must have 1 to 1024 non-empty choices"),
        (choices(*map(str, range(MOST + 1))), "must have 1 to 1024 non-empty choices"),
        (choices("a", 1), "not a list of strings"),
        (Structure(kind="choice", text='"ab"'), "not a list of strings"),
        (Structure(kind="choice", text="["), "not a JSON list"),
        (Structure(kind="choice", text="[" * 100_000), "not a JSON list"),
        (choices("a", "b\0"), "a choice with NUL or a lone surrogate"),
        (choices("\ud800"), "a choice with NUL or a lone surrogate"),
        (choices("a\udfff"), "a choice with NUL or a lone surrogate"),
    ],
)
def test_other_choices_are_rejected(structure: Structure, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        grammar_text(structure)
