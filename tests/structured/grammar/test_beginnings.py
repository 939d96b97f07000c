"""What texts of a grammar may begin with."""

from __future__ import annotations

import json

import pytest

from cluster.structured.grammar.beginnings import may_begin_with
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
from pagedray.errors import InvalidRequestError
from pagedray.request import Structure

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
def test_an_answer_that_may_begin_as_calls_is_refused(kind: str, answer: str) -> None:
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
