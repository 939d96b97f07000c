"""Schemas without descriptions allow the same values."""

from __future__ import annotations

import json

import pytest

from cluster.serving.tools.forced_calls import schema_without_text
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.structure import Structure

NAMED_AS_KEYWORDS = {"title": {"type": "string"}, "default": {"enum": [{"description": 1}]}}
DESCRIBED = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Search",
    "type": "object",
    "description": "Finds things.",
    "properties": {
        "query": {"type": "string", "description": "What to find.", "examples": ["a"]},
        "title": {"type": "string", "title": "Title"},
        "default": {"enum": [{"description": 1}], "default": {"description": 1}},
        "either": {
            "anyOf": [{"$ref": "#/$defs/place", "description": "A place."}, {"type": "null"}],
            "default": None,
        },
        "many": {"type": "array", "items": {"type": "integer", "description": "One."}},
    },
    "required": ["query", "title"],
    "additionalProperties": False,
    "$defs": {"place": {"description": "A place.", "type": "object", "properties": {}}},
}
BARE = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        **NAMED_AS_KEYWORDS,
        "either": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "many": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["query", "title"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {}}},
}


def test_only_what_restricts_no_value_is_left_out() -> None:
    assert schema_without_text(DESCRIBED) == BARE


def test_the_grammar_is_the_same() -> None:
    described, bare = (
        grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
        for schema in (DESCRIBED, schema_without_text(DESCRIBED))
    )
    assert described == bare


@pytest.mark.parametrize("odd", [{"properties": 5}, {"anyOf": {"a": 1}}, {"items": True}])
def test_invalid_parts_are_kept(odd: dict[str, object]) -> None:
    assert schema_without_text(odd) == odd
