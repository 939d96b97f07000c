"""What texts of a grammar may begin with."""

from __future__ import annotations

import json
import random
import re
from itertools import product

import pytest

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
)
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from cluster.structured.grammar.turn import may_begin_with
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import Structure

ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("abcd", True),
        ("abc", True),
        ("ab", False),
        ("ab?[b-d]+", True),
        ("[^b]*", False),
        ("a.*", True),
        (".{0,2}", False),
        (".{3,9}", True),
        ("(ab|a)(c|x)", True),
        ("(x|ab){2}", False),
        ("(a?b?c?){2,}", True),
        ("(d?)*abc", True),
        ("", False),
    ],
)
def test_regular_expressions(pattern: str, wanted: bool) -> None:
    assert may_begin_with("abc", {}, read_regex(pattern)) == wanted


def random_pattern(rng: random.Random, level: int = 0) -> str:
    parts = [random_pattern(rng, level + 1) for _ in range(2)] if level < 3 else ["a", "b"]
    forms = ["a", "b", "[ab]", "[^a]", "{0}{1}", "({0}|{1})", "({0})?", "({0})*", "({0}){{2,3}}"]
    return rng.choice(forms if level < 3 else forms[:4]).format(*parts)


def test_random_expressions_begin_as_their_texts_do() -> None:
    rng = random.Random(1)
    texts = ["".join(text) for length in range(8) for text in product("abc", repeat=length)]
    num_beginnings = 0
    for _ in range(80):
        pattern = random_pattern(rng)
        matching = [text for text in texts if re.fullmatch(pattern, text)]
        for beginning in ("a", "ab", "ba", "aab"):
            wanted = any(text.startswith(beginning) for text in matching)
            assert may_begin_with(beginning, {}, read_regex(pattern)) == wanted, pattern
            num_beginnings += wanted
    assert 40 < num_beginnings < 280


def test_nested_repetitions_are_read_once() -> None:
    assert not may_begin_with("x" * 30 + "<", {}, read_regex("((((((((x?)*)*)*)*)*)*)*)*"))


def test_rules() -> None:
    more = Concat((Text("x"), Rule("more")))
    rules: dict[str, Expression] = {
        "more": Alternation((more, Text("y"))),
        "left": Concat((Rule("left"), Text("z"))),
    }
    assert may_begin_with("xxx", rules, Rule("more"))
    assert may_begin_with("xy", rules, Rule("more"))
    assert not may_begin_with("xz", rules, Rule("more"))
    assert may_begin_with("xyxy", rules, Repeat(Rule("more"), 1, None))
    assert not may_begin_with("z", rules, Rule("left"))


def test_json() -> None:
    rules, start = read_json_schema('{"type": "array", "items": {"enum": ["<a>", "b"]}}')
    assert may_begin_with('["<a', rules, start)
    assert not may_begin_with('["<b', rules, start)
    assert not may_begin_with("<tool_call>", rules, start)


def turn(kind: str, answer: str) -> Structure:
    text = {
        "form": {"mark": "<call>", "separator": ";"},
        "call": '{"type": "integer"}',
        "is_parallel": False,
        "answer_kind": kind,
        "answer_text": answer,
    }
    return Structure(kind="turn", text=json.dumps(text))


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("regex", ".*"),
        ("choice", '["a", "<call>"]'),
        ("structural_tag", json.dumps({"format": ANY})),
        ("structural_tag", json.dumps(
            {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f"]})),
    ],
)  # fmt: skip
def test_an_answer_that_may_begin_as_calls_is_rejected(kind: str, answer: str) -> None:
    with pytest.raises(InvalidRequestError, match="structure may begin with '<call>'"):
        grammar_text(turn(kind, answer))


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("regex", "[^<].*"),
        ("json_object", ""),
        ("structural_tag", json.dumps({"format": {
            "type": "tag", "begin": "Answer: ", "content": ANY, "end": ""}})),
    ],
)  # fmt: skip
def test_an_answer_that_begins_otherwise_is_read(kind: str, answer: str) -> None:
    assert "root ::=" in grammar_text(turn(kind, answer))
