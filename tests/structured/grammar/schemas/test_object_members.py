"""Members of an object come in order, and those not required may be omitted."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import permutations, product
from typing import TYPE_CHECKING

import pytest

from cluster.structured.grammar.expressions import Alternation, Concat, Expression, Repeat, Rule
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.schemas.json_schema import read_json_schema
from pagedray.structure import Structure
from tests.structured.grammar.as_regex import as_regex

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.structured.matchers.xgrammar_library import XGrammarLibrary
    from cluster.structured.processes.compiler import StructureCompiler

NAMES = ("a", "b", "c", "d")


def schema_of(names: Sequence[str], required: Sequence[str]) -> str:
    properties = {name: {"type": "null"} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": required})


def without_rules(expression: Expression, rules: Mapping[str, Expression]) -> Expression:
    """Return an expression with the rules that it refers to in their places."""
    match expression:
        case Rule(name):
            return without_rules(rules[name], rules)
        case Concat(parts):
            return Concat(tuple(without_rules(part, rules) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(without_rules(part, rules) for part in parts))
        case Repeat(part, fewest, most):
            return Repeat(without_rules(part, rules), fewest, most)
    return expression


@pytest.mark.parametrize("are_required", list(product((False, True), repeat=len(NAMES))))
def test_exactly_the_objects_with_all_required_members_in_order_match(
    are_required: tuple[bool, ...],
) -> None:
    required = [name for name, one in zip(NAMES, are_required, strict=True) if one]
    rules, start = read_json_schema(schema_of(NAMES, required))
    pattern = re.compile(as_regex(without_rules(start, rules)))
    for number in range(len(NAMES) + 1):
        for names in permutations(NAMES, number):
            text = json.dumps(dict.fromkeys(names))
            is_valid = list(names) == sorted(names) and set(required) <= set(names)
            assert (pattern.fullmatch(text) is not None) == is_valid, text


@pytest.mark.parametrize("text", ['{, "a": null}', '{"a": null,}', '{"a": null "b": null}', "{,}"])
def test_commas_are_only_between_members(text: str) -> None:
    rules, start = read_json_schema(schema_of(NAMES, ()))
    assert re.fullmatch(as_regex(without_rules(start, rules)), text) is None


def test_an_object_without_allowed_members_is_empty(compiler: StructureCompiler) -> None:
    text = json.dumps({"type": "object", "properties": {"a": False}})
    rules, start = read_json_schema(text)
    assert re.fullmatch(as_regex(without_rules(start, rules)), "{}")
    asyncio.run(compiler.compile(Structure(kind="json_schema", text=text)))


def test_the_most_optional_properties_compile_to_a_small_grammar(
    library: XGrammarLibrary,
) -> None:
    text = schema_of([f"parameter_{number}" for number in range(128)], ())
    compiled, _ = library.compile_grammar(grammar_text(Structure(kind="json_schema", text=text)))
    assert len(library.json_of(compiled)) < 20 * 2**20
