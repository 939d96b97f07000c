"""Grammars grow in proportion to their structures, up to the limits that OpenAI documents."""

from __future__ import annotations

import json
import random
import string
from typing import TYPE_CHECKING

import pytest
import xgrammar
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Callable

Schema = dict[str, object]

MOST = 1024


def text_of(schema: object) -> str:
    return grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))


def names(number: int, length: int) -> list[str]:
    generator = random.Random(number)
    return ["".join(generator.choices(string.ascii_letters, k=length)) for _ in range(number)]


def lists(depth: int, **limits: int) -> Schema:
    schema: Schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, **limits}
    return schema


def objects(depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    return schema


def maps(depth: int) -> Schema:
    schema: Schema = {"enum": names(9, 15)}
    for _ in range(depth):
        schema = {"type": "object", "additionalProperties": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        *((make, (5, 10, 20)) for make in (lists, maps)),
        *((lambda n, k=key: lists(n, **{k: 20}), (5, 10, 20)) for key in ("maxItems", "minItems")),
        (lambda n: {"enum": names(n, 15)}, (100, 500, 1000)),
        (lambda n: {"items": {"enum": names(n, 15)}, "type": "array"}, (100, 500, 1000)),
        (lambda n: {"properties": {k: {"enum": names(99, 9)} for k in names(n, 5)}}, (20, 50, 100)),
        (lambda n: {"properties": {k: objects(1) for k in names(n, 5)}}, (20, 50, 100)),
        (lambda n: {"anyOf": [{"const": one} for one in names(n, 30)]}, (100, 500, 1000)),
        (lambda n: {"type": "string", "maxLength": n}, (64, 1000, 100_000)),
        (lambda n: {"type": "array", "maxItems": n}, (64, 1000, 100_000)),
    ],
)
def test_grammars_grow_linearly(make: Callable[[int], Schema], sizes: tuple[int, ...]) -> None:
    fewest = sizes[0]
    least = len(text_of(make(fewest)))
    for size in sizes[1:]:
        assert len(text_of(make(size))) <= 1.3 * least * size / fewest


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": names(1000, 15)}, names(1000, 15)[-1], "a" * 15),
        ({"enum": [[one] for one in names(300, 50)]}, [names(300, 50)[200]], ["a"]),
        (
            {"type": "object", "properties": {"a": {"enum": names(1000, 15)}}, "required": ["a"]},
            {"a": names(1000, 15)[7]},
            {"a": ""},
        ),
        (lists(11), json.loads("[" * 11 + '{"a": "b"}' + "]" * 11), [[]] * 2 + [[1]]),
        (lists(20, minItems=1, maxItems=9), json.loads("[" * 20 + '{"a": ""}' + "]" * 20), []),
        ({"type": "array", "maxItems": 300, "items": {"const": 1}}, [1] * 300, [1] * 301),
        ({"type": "array", "minItems": 100, "items": {"const": 1}}, [1] * 100, [1] * 99),
        (
            {"type": "array", "prefixItems": [{"const": 2}], "maxItems": 99, "items": {"const": 1}},
            [2] + [1] * 98,
            [2] + [1] * 99,
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 1}, "maxProperties": 70},
            dict.fromkeys(string.printable[:70], 1),
            dict.fromkeys(string.printable[:71], 1),
        ),
        (
            {
                "type": "object",
                "properties": {
                    k: {
                        "type": "object",
                        "properties": {n: {"type": "null"} for n in names(100, 8)},
                    }
                    for k in names(50, 6)
                },
            },
            {names(50, 6)[49]: {names(100, 8)[99]: None}},
            {names(50, 6)[49]: {names(100, 8)[99]: 1}},
        ),
    ],
)
def test_large_schemas_are_enforced(schema: Schema, good: object, bad: object) -> None:
    grammar = Grammar.from_ebnf(text_of(schema))
    assert _is_grammar_accept_string(grammar, json.dumps(good))
    assert not _is_grammar_accept_string(grammar, json.dumps(bad))


def test_choices_of_long_texts_are_enforced() -> None:
    choices = names(500, 30)
    text = grammar_text(Structure(kind="choice", text=json.dumps(choices)))
    grammar = Grammar.from_ebnf(text)
    assert _is_grammar_accept_string(grammar, choices[-1])
    assert not _is_grammar_accept_string(grammar, choices[-1][:-1])
    assert len(text) < 2 * 500 * 35


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
