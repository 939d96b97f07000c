"""Structural tags accept what a search for their marks says, and nothing else."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import Structure

Part = dict[str, Any]  # Any: JSON
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


def accepts(given: Part, *texts: str) -> list[bool]:
    text = grammar_text(Structure(kind="structural_tag", text=json.dumps(given)))
    grammar = xgrammar.Grammar.from_ebnf(text)
    return [_is_grammar_accept_string(grammar, one) for one in texts]


def tag(begin: str, end: str, content: Part | None = None) -> Part:
    return {
        "begin": begin,
        "content": content or {"type": "json_schema", "json_schema": NUMBER},
        "end": end,
    }


def triggered(*triggers: str, **more: Any) -> Part:
    return {"format": {"type": "triggered_tags", "triggers": triggers, **more}}


def sequence(*elements: Part) -> Part:
    return {"format": {"type": "sequence", "elements": elements}}


def const(value: str) -> Part:
    return {"type": "const_string", "value": value}


ANY = {"type": "any_text"}


def expected(text: str, triggers: list[str], begins: list[str], end: str) -> bool:
    """Return whether what follows each trigger is the rest of a tag with a digit."""
    at = 0
    while True:
        found = [one for one in (text.find(trigger, at) for trigger in triggers) if one >= 0]
        if not found:
            return True
        forms = [re.compile(f"{re.escape(one)}[0-9]{re.escape(end)}") for one in begins]
        matches = [match for form in forms if (match := form.match(text, min(found)))]
        if not matches:
            return False
        (match,) = matches
        at = match.end()


@pytest.mark.parametrize(
    ("triggers", "begins", "end"),
    [
        (["<a>"], ["<a>"], "b"),
        (["aab"], ["aab", "aabb"], "a"),
        (["aa"], ["aab", "aaa"], ";"),
        (["ab", "ba"], ["abb", "baa"], ""),
        (["abab", "bb"], ["ababa", "bba"], "ab"),
        (["ab", "a"], ["abb", "a<"], ";"),
    ],
)
def test_free_text_ends_at_the_first_trigger(
    triggers: list[str], begins: list[str], end: str
) -> None:
    rng = random.Random(f"{triggers}")
    given = triggered(*triggers, tags=[tag(begin, end) for begin in begins])
    pieces = [*"<ab>;1", *begins, *(f"{begin}7{end}" for begin in begins)]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(9))) for _ in range(400)]
    wanted = [expected(text, triggers, begins, end) for text in texts]
    assert {True, False} == set(wanted)
    assert accepts(given, *texts) == wanted


def test_structures_with_triggers_are_tags_with_schemas() -> None:
    given = {
        "type": "structural_tag",
        "structures": [
            {"begin": f"<f={name}>", "schema": {"const": name}, "end": "</f>"} for name in "ab"
        ],
        "triggers": ["<f="],
    }
    good = ("", "any text < <f", 'x<f=a>"a"</f>y<f=b>"b"</f>', "<" * 50)
    bad = ("<f=c>", '<f=a>"b"</f>', '<f=a>"a"', "<f=")
    assert accepts(given, *good, *bad) == [True] * len(good) + [False] * len(bad)


def test_tags_may_be_required_and_end_the_text() -> None:
    tags = [tag("<", ">")]
    texts = ("", "a<1>", "<1>", "<1>a", "<1>a<2>b")
    for is_needed, is_last, wanted in (
        (False, False, [True, True, True, True, True]),
        (True, False, [False, False, True, True, True]),
        (False, True, [True, True, True, False, False]),
        (True, True, [False, False, True, False, False]),
    ):
        given = triggered("<", tags=tags, at_least_one=is_needed, stop_after_first=is_last)
        assert accepts(given, *texts) == wanted


def test_text_inside_of_a_tag_ends_at_its_end() -> None:
    given = sequence(
        {"type": "tag", **tag("<think>", "</think>", ANY)},
        {"type": "json_schema", "json_schema": NUMBER},
    )
    good = ("<think></think>1", "<think>a < </thin </think>2")
    bad = ("<think>1", "<think></think>", "<think></think>x</think>1", "1")
    assert accepts(given, *good, *bad) == [True, True, False, False, False, False]


def test_text_ends_where_a_literal_text_or_a_tag_begins() -> None:
    given = sequence(ANY, const("EN"), const("D"), {"type": "or", "elements": [const("x"), ANY]})
    assert accepts(given, "END", "aENDx", "EENDENDb", "EN", "ab") == [True] * 3 + [False] * 2
    given = sequence(ANY, {"type": "tag", **tag("[", "]")})
    assert accepts(given, "[1]", "a[1]", "a[b[1]", "a", "[1]a") == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("trigger", "begin", "end"),
    [("<", "<f>", "</t>"), ("<f", "<f>", "<"), ("|", "|f>", "|"), ("bc", "bcd", "abc")],
)
def test_a_trigger_and_the_end_around_it_may_begin_alike(
    trigger: str, begin: str, end: str
) -> None:
    inside = triggered(trigger, tags=[tag(begin, ";")])["format"]
    for given in (
        {"format": {"type": "tag", **tag("[", end, inside)}},
        sequence(const("["), inside, const(end)),
    ):
        good = (f"[{end}", f"[x{end}", f"[x{begin}1;{begin}2;y{end}")
        bad = ("[", "[x", f"[{begin}1;", f"[{begin};{end}", f"[{end}x")
        assert accepts(given, *good, *bad) == [True] * len(good) + [False] * len(bad)


def test_tags_with_a_separator() -> None:
    tags = [tag("A", "."), tag("B", "", {"type": "regex", "pattern": "z+"})]
    given = {"format": {"type": "tags_with_separator", "tags": tags, "separator": "\n"}}
    good, bad = ("", "A1.", "A1.\nBzz\nA2."), ("A1.A2.", "Bz\n", "\n", "B")
    assert accepts(given, *good, *bad) == [True] * 3 + [False] * 4


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "structure.structures must be a non-empty list"),
        ({"format": 5}, "format must be an object"),
        ({"format": {"type": "x"}}, "format.type must be one of any_text, "),
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "format.type must be one"),
        ({"format": {"type": "grammar", "grammar": "x"}}, "a grammar cannot be a part"),
        ({"format": {"type": "any_text", "excludes": ["a"]}},
         "structure.format.excludes is not supported: allowed are type."),
        ({"format": const("")}, "format.value must be a non-empty string"),
        ({"format": const("\0")}, "format.value has NUL or a lone surrogate"),
        (sequence(ANY, {"type": "regex", "pattern": "a"}), "format.elements.0 is free text"),
        (sequence(ANY, ANY), "format.elements.0 is free text"),
        (triggered("b", tags=[tag("a", "")]), "format.tags.0.begin must begin with one of"),
        (triggered("a", tags=[]), "format.tags must be a non-empty list of"),
        (triggered("a", tags=["a"]), "format.tags must be a non-empty list of objects"),
        (triggered(tags=[tag("a", "")]), "format.triggers must be a non-empty list"),
        ({"format": {"type": "triggered_tags", "triggers": "a", "tags": [tag("a", "")]}},
         "format.triggers must be a non-empty list"),
        ({"format": {"type": "triggered_tags", "triggers": ["a", 5], "tags": [tag("a", "")]}},
         "format.triggers.1 must be a non-empty string"),
        (triggered("a", tags=[tag("a", ""), {**tag("a", ""), "x": 1}]), "format.tags.1.x is not"),
        ({"format": {"type": ["or"]}}, "format.type must be one of"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["a"], "x": 1},
         "structure.x is not supported"),
        (triggered("a", "b", tags=[tag("a", "")]), "format.triggers.1 does not begin any tag"),
        (triggered("a", "", tags=[tag("a", "")]), "format.triggers.1 must be a non-empty string"),
        (triggered("a", tags=[tag("a", "")], at_least_one=1), "at_least_one must be true"),
        (triggered("a", tags=[{"begin": "a", "content": ANY}]), "format.tags.0.end must be"),
        (triggered("b", "abc", tags=[tag("b", ""), tag("abc", "")]),
         "structure.format has the mark 'abc', which is never reached, since it contains 'b'."),
        (sequence(triggered("abc", tags=[tag("abc", "")])["format"], const("b")),
         "format.elements.0 has the mark 'abc', which is never reached"),
        (triggered("a", tags=[tag("a", "\0")]), "format.tags.0.end has NUL"),
        (triggered("a", tags=[{"type": "or", **tag("a", "")}]), "format.tags.0.type must be tag."),
        (triggered("a", tags=[tag("a", "", {"type": "regex", "pattern": "("})]),
         "structure.format.tags.0.content has an unsupported regular expression"),
        ({"type": "json_schema", **triggered("a", tags=[tag("a", "")])},
         "structure.type must be structural_tag."),
        ({"format": {"type": "tags_with_separator", "tags": [tag("a", "")], "separator": "\0"}},
         "format.separator has NUL"),
        ({"format": {"type": "tags_with_separator", "tags": [{"type": "x"}], "separator": ""}},
         "format.tags.0.type must be tag."),
        (triggered("a" * 200, tags=[tag("a" * 200, "")]), "at more than 128 characters"),
        (triggered("a", tags=[tag("a", "", {"type": "json_schema"})]), "must be a JSON Schema"),
        ({"format": {"type": "or", "elements": [const("a")] * 300}}, "256 parts"),
        ({"structures": [{"bgin": "a", "schema": {}, "end": ""}], "triggers": ["a"]},
         "structure.structures.0.bgin is not supported: did you mean begin?"),
        ({"structures": [{"begin": "a", "schema": {}, "end": "", "x": 1}], "triggers": ["a"]},
         "structure.structures.0.x is not supported"),
        ({"structures": [{"begin": "a", "end": ""}], "triggers": ["a"]},
         "structure.structures.0.schema must be a JSON Schema."),
        ({"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]},
         "structure.structures.0.begin must begin with one of the triggers."),
        ({"structures": [{"begin": "a", "schema": {"not": 1}, "end": ""}], "triggers": ["a"]},
         "structure.structures.0.schema has an unsupported JSON Schema: #/not"),
    ],
)  # fmt: skip
def test_bad_tags_are_rejected(given: Part, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        accepts(given)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "part",
    [
        const("a"),
        {"type": "json_schema", "json_schema": NUMBER},
        {"type": "regex", "pattern": "a"},
        ANY,
        {"type": "sequence", "elements": [const("a")]},
        {"type": "or", "elements": [const("a")]},
        {"type": "tag", **tag("a", "b")},
        {"type": "triggered_tags", "triggers": ["a"], "tags": [tag("a", "")]},
        {"type": "tags_with_separator", "tags": [tag("a", "")], "separator": ","},
    ],
)
def test_each_part_has_no_other_fields(part: Part) -> None:
    accepts({"format": part})
    for given, path in (
        ({"format": part | {"x": 1}}, "structure.format.x"),
        (
            {"format": {"type": "or", "elements": [part | {"x": 1}]}},
            "structure.format.elements.0.x",
        ),
        ({"format": part, "x": 1}, "structure.x"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            accepts(given)
        assert f"{path} is not supported" in str(caught.value)


def test_deep_parts_are_rejected() -> None:
    part: Part = ANY
    for _ in range(40):
        part = {"type": "tag", **tag("<", ">", part)}
    with pytest.raises(InvalidRequestError, match="16 levels"):
        accepts({"format": part})
    with pytest.raises(InvalidRequestError, match="not a valid structural tag"):
        grammar_text(Structure(kind="structural_tag", text='{"a":' * 20_000))


def test_text_that_is_no_json_is_rejected() -> None:
    for text in ("", "{", "[]", "5", '{"a":"\ud800"}', '{"format":NaN}'):
        with pytest.raises(InvalidRequestError, match="structur"):
            grammar_text(Structure(kind="structural_tag", text=text))


def test_a_tag_is_an_answer_beside_tool_calls() -> None:
    answer = {"format": const("done")}
    turn = {
        "form": {"mark": "<call>", "separator": ";"},
        "call": json.dumps({"type": "object", "properties": {"a": NUMBER}, "required": ["a"]}),
        "is_parallel": False,
        "answer_kind": "structural_tag",
        "answer_text": json.dumps(answer),
    }
    grammar = xgrammar.Grammar.from_ebnf(
        grammar_text(Structure(kind="turn", text=json.dumps(turn)))
    )
    for text, wanted in {"done": True, '<call>{"a":1}': True, "x": False}.items():
        assert _is_grammar_accept_string(grammar, text) == wanted
