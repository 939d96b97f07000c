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


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "email", "pattern": r"^(?!\.)[a-z.]+@b\.cd$"}, "a@b.cd", "ab"),
        ({"format": "uuid", "pattern": "^[a-f]{3}$"}, "abc", "abcd"),
        ({"format": "unknown", "pattern": "^a+$"}, "aa", "b"),
        ({"format": "email", "maxLength": 50}, "ann@example.com", "ann@" + "b" * 50 + ".com"),
        ({"pattern": "^a+$", "maxLength": 3}, "aaa", "aaaa"),
        ({"pattern": "^a*$", "minLength": 2}, "aa", "a"),
        ({"pattern": "^[a-z]+-[0-9]+$", "maxLength": 11}, "abc-123", "abcdefghi-12"),
        ({"pattern": "b", "minLength": 1, "maxLength": 5}, "abc", "aabaaa"),
        ({"pattern": "^(?:a|bcd)$", "maxLength": 2}, "a", "bcd"),
        ({"pattern": "^(?:ab)*$", "maxLength": 5}, "abab", "ababab"),
        ({"pattern": "^$|^(?:ab)+$"}, "", "a"),
        ({"pattern": "^.+$", "minLength": 2, "maxLength": 70}, 'a"b', "a"),
        ({"enum": ["aa", "b", "abc"], "pattern": "^a", "maxLength": 2}, "aa", "abc"),
        ({"const": "a", "format": "x", "minLength": 1}, "a", "b"),
    ],
)
def test_patterns_are_combined_with_formats_and_lengths(
    schema: dict[str, object], good: str, bad: str
) -> None:
    text = grammar_text(
        Structure(kind="json_schema", text=json.dumps({"type": "string", **schema}))
    )
    grammar = xgrammar.Grammar.from_ebnf(text)
    assert _is_grammar_accept_string(grammar, json.dumps(good))
    assert not _is_grammar_accept_string(grammar, json.dumps(bad))
