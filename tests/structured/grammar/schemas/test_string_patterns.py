"""A pattern may match anywhere in a string, unless it is anchored."""

from __future__ import annotations

import json
import re
from itertools import product

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.structure import Structure

TEXTS = ["".join(characters) for length in range(4) for characters in product("ab$", repeat=length)]


def accepted(pattern: str) -> set[str]:
    """Return the strings that a pattern allows, of up to three characters."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    grammar = xgrammar.Grammar.from_ebnf(grammar_text(Structure(kind="json_schema", text=schema)))
    return {one for one in TEXTS if _is_grammar_accept_string(grammar, json.dumps(one))}


def matched(pattern: str) -> set[str]:
    return {one for one in TEXTS if re.search(pattern, one)}


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a", "^a", "a$", "^a$", "a|b", "^(a|b)", "(a|b)$", "^(a|b)$", "^(?:aa|b)", "(a|b)b"),
        *(r"a\$", r"^a\$", r"^a\$$", r"\$$", "^", "$"),
    ],
)
def test_strings_are_those_in_which_the_pattern_is_found(pattern: str) -> None:
    assert accepted(pattern) == matched(pattern)


@pytest.mark.parametrize(
    ("pattern", "usual"), [("^a|b", "^(a|b)"), ("a|b$", "(a|b)$"), ("^a|b$", "^(a|b)$")]
)
def test_an_anchor_of_one_alternative_applies_to_all(pattern: str, usual: str) -> None:
    assert accepted(pattern) == matched(usual)
    assert matched(usual) < matched(pattern)
