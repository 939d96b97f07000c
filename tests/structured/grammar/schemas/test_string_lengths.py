"""Bounds on the length of a string do not change which characters it may have."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.calls.element_arguments import ARG_KEYS, PARAMETERS
from cluster.structured.grammar.calls.python_arguments import read_python_arguments
from cluster.structured.grammar.expressions import Concat, Text, write_ebnf
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.structure import Structure

if TYPE_CHECKING:
    from cluster.structured.grammar.calls.element_arguments import ElementNotation
    from cluster.structured.matchers.xgrammar_library import XGrammarLibrary

SPECIAL = 'q"\\/\b\f\n\r\t\N{SNOWMAN}\N{GRINNING FACE}<'
LIMITS = [
    *((0, 1), (0, 7), (3, 3), (0, 60), (5, 64), (1, 65), (0, 100), (20, 255), (40, 300), (0, 4000)),
    *((64, 64), (65, 65), (100, 130), (200, 1000), (1, None), (40, None), (300, None)),
    *((0, 100_000), (33, 2**31 - 1), (33, 200_000)),
]


def compiled(schema: object) -> xgrammar.Grammar:
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    return xgrammar.Grammar.from_ebnf(grammar_text(structure))


def limited(minimum: int, maximum: int | None) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    schema |= {"minLength": minimum} if minimum else {}
    return schema | ({} if maximum is None else {"maxLength": maximum})


def strings(minimum: int, maximum: int | None) -> list[tuple[str, bool]]:
    """Return strings, and whether they have an allowed length."""
    most = minimum + 500 if maximum is None else min(maximum, 5000)
    lengths = {0, 1, minimum - 1, minimum, minimum + 1, (minimum + most) // 2, most - 1, most}
    if maximum is not None and maximum < 5000:
        lengths |= {maximum + 1, maximum + 2, maximum + 16, maximum + 32}
    texts = [(SPECIAL * 600)[: max(0, length)] for length in lengths]
    return [(one, minimum <= len(one) <= most) for one in texts]


@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strings_of_a_length_have_any_characters(minimum: int, maximum: int | None) -> None:
    grammar = compiled(limited(minimum, maximum))
    for string, is_allowed in strings(minimum, maximum):
        for is_ascii in (False, True) if string.isascii() else (False,):
            text = json.dumps(string, ensure_ascii=is_ascii)
            assert _is_grammar_accept_string(grammar, text) == is_allowed, len(string)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "propertyNames": {"maxLength": 3}}, {'a"\n': 1}, {'a"\nb': 1}),
        ({"type": "array", "items": {"maxLength": 2}}, ['\\"', "\t"], ['\\"x']),
        ({"anyOf": [{"maxLength": 2}, {"type": "null"}]}, "\\\\", "\\\\\\"),
        (
            {"type": "object", "properties": {"a": {"minLength": 2}}, "required": ["a"]},
            {"a": '""'},
            {"a": '"'},
        ),
        ({"type": "string", "pattern": "^.{1,80}$"}, '"\\' * 40, '"\\' * 40 + "x"),
        ({"type": "string", "pattern": "^[\\s\\S]{3}$"}, '"\n\\', '"\n'),
        ({"type": "string", "pattern": "^[^a]{90,}$"}, '\n"' * 50, '\n"' * 40),
        ({"type": "string", "pattern": '^(?:ab|"){70}$'}, 'ab"' * 35, 'ab"' * 34),
    ],
)
def test_schemas_with_such_strings(schema: object, good: object, bad: object) -> None:
    grammar = compiled(schema)
    assert _is_grammar_accept_string(grammar, json.dumps(good))
    assert not _is_grammar_accept_string(grammar, json.dumps(bad))


@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strict_python_calls_have_any_characters(minimum: int, maximum: int | None) -> None:
    schema = {"type": "object", "properties": {"a": limited(minimum, maximum)}, "required": ["a"]}
    grammar = xgrammar.Grammar.from_ebnf(write_ebnf(*read_python_arguments(json.dumps(schema))))
    for string, is_allowed in strings(minimum, maximum):
        text = 'a="' + json.dumps(string, ensure_ascii=False)[1:-1] + '"'
        assert _is_grammar_accept_string(grammar, text) == is_allowed, len(string)


@pytest.mark.parametrize("notation", [PARAMETERS, ARG_KEYS])
@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strict_calls_of_elements_have_all_characters_but_angles(
    minimum: int, maximum: int | None, notation: ElementNotation
) -> None:
    schema = {"type": "object", "properties": {"a": limited(minimum, maximum)}, "required": ["a"]}
    rules, arguments = notation.read_arguments(json.dumps(schema))
    end = Text("END")
    text = write_ebnf(notation.rules() | rules, Concat((arguments, end)))
    grammar = xgrammar.Grammar.from_ebnf(text)
    between = ">\n" if notation is PARAMETERS else "</arg_key><arg_value>"
    for string, is_allowed in strings(minimum, maximum):
        value = string.replace("<", ">")
        written = f"{notation.key_begin}a{between}{value}{notation.line}{notation.value_end}END"
        assert _is_grammar_accept_string(grammar, written) == is_allowed, len(string)


@pytest.mark.parametrize(
    "schema",
    [
        *({"items": one} for one in (limited(0, 1000), limited(40, 2000), limited(300, None))),
        {"items": {"pattern": "^[^x]{1,500}$"}},
        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"items": {"type": "null"}, "maxItems": 300},
    ],
)
def test_masks_allow_only_tokens_that_the_matcher_accepts(
    library: XGrammarLibrary, schema: dict[str, object]
) -> None:
    text = grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
    compiled_grammar, _ = library.compile_grammar(text)
    matcher, generator = xgrammar.GrammarMatcher(compiled_grammar), random.Random(1)
    own = library.matcher(compiled_grammar)
    for _ in range(60):
        allowed = own.allowed_ids(library.vocab_size).tolist()
        for token_id in generator.sample(allowed, min(200, len(allowed))):
            assert matcher.fork().accept_token(token_id)
        token_id = generator.choice(allowed)
        assert own.accept_token(token_id)
        assert matcher.accept_token(token_id)
        if own.has_ended:
            break
