"""Arrays whose items must differ."""

from __future__ import annotations

import asyncio
import json
import random
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from cluster.structured.grammar.json_schema import read_json_schema
from pagedray.sampling_params import Structure
from tests.structured.grammar.as_regex import as_regex
from tests.structured.grammar.random_schemas import random_text
from tests.structured.grammar.test_json_schema import without_rules

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler

EOS = 0
VALUES = ("a", 1, None, True)


@pytest.mark.parametrize(("fewest", "most"), [(0, None), (2, None), (1, 2), (0, 1), (0, 0), (3, 9)])
def test_exactly_the_arrays_of_different_items_match(fewest: int, most: int | None) -> None:
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"enum": VALUES},
        "uniqueItems": True,
        "minItems": fewest,
        **({} if most is None else {"maxItems": most}),
    }
    rules, start = read_json_schema(json.dumps(schema))
    pattern = re.compile(as_regex(without_rules(start, rules)))
    validator = jsonschema.Draft202012Validator(schema)
    for length in range(5):
        for items in product(VALUES, repeat=length):
            is_match = pattern.fullmatch(json.dumps(items)) is not None
            assert is_match == validator.is_valid(list(items)), items


def test_values_that_are_equal_in_json_schema_count_once() -> None:
    items = {"enum": [1, 1.0, True, {"a": [2.0]}, {"a": [2]}]}
    rules, start = read_json_schema(
        json.dumps({"type": "array", "items": items, "uniqueItems": True})
    )
    pattern = re.compile(as_regex(without_rules(start, rules)))
    assert pattern.fullmatch('[true, {"a": [2.0]}, 1]')
    assert not pattern.fullmatch("[1, 1.0]")
    assert not pattern.fullmatch('[{"a": [2]}, {"a": [2.0]}]')


@pytest.mark.parametrize(
    "items",
    [{"$ref": "#/$defs/color"}, {"type": "boolean"}, {"anyOf": [{"const": 1}, {"type": "null"}]}],
)
def test_texts_of_sets_are_valid(
    items: dict[str, object], compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    """As pydantic writes set[Color]."""
    colors = [f"color {number}" for number in range(7)]
    schema = {
        "$defs": {"color": {"enum": colors, "type": "string"}},
        "type": "object",
        "properties": {"x": {"type": "array", "items": items, "uniqueItems": True, "minItems": 2}},
        "required": ["x"],
    }
    kind = Structure(kind="json_schema", text=json.dumps(schema))
    grammar = asyncio.run(compiler.compile(kind))
    for seed in range(4):
        text = random_text(grammar, tokenizer, random.Random(seed), eos=EOS)
        assert text is not None
        jsonschema.validate(json.loads(text), schema)
