"""Schemas of oneOf are mutually exclusive only if that is certain."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.structured.grammar.schema_keywords import are_disjoint

Schema = dict[str, Any]  # Any: JSON
TARGETS: dict[object, object] = {"a": {"const": "a"}, "true": True}


def of_kind(kind: object, *, name: str = "kind", **more: object) -> Schema:
    return {"type": "object", "properties": {name: kind}, "required": [name], **more}


A, B = of_kind({"const": "a"}), of_kind({"const": "b"})


def without(keyword: str) -> Schema:
    return {key: value for key, value in A.items() if key != keyword}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": "a"}, {"const": "b"}),
        ({"enum": ["a", "b"]}, {"enum": ["c"]}),
        ({"enum": ["a"]}, {"const": "b"}),
        ({"type": "string"}, {"type": "integer"}),
        ({"type": ["string", "null"]}, {"type": ["integer", "boolean"]}),
        ({"const": "a", "type": "string"}, {"type": "null"}),
        ({"$ref": "a"}, {"const": "b"}),
        (A, B),
        (A, of_kind({"enum": ["b", "c"]})),
        (of_kind({"const": "a"}, required=["x", "kind"]), B),
        (A, {"type": "array"}),
    ],
)
def test_schemas_that_share_no_value_are_disjoint(one: Schema, other: Schema) -> None:
    assert are_disjoint([one, other], TARGETS.__getitem__)
    assert are_disjoint([other, one], TARGETS.__getitem__)
    assert not are_disjoint([one, other, one], TARGETS.__getitem__)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": "a"}, {"const": "a"}),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        # They are the same number.
        ({"const": 1}, {"const": 1.0}),
        ({"enum": ["a", 1]}, {"enum": ["b", 1.0]}),
        ({"type": "number"}, {"type": "integer"}),
        ({"type": ["string", "null"]}, {"type": ["integer", "null"]}),
        ({"type": "string"}, {}),
        ({}, {}),
        (True, {"type": "string"}),
        ({"type": "string"}, {"const": "a"}),
        ({"type": ["string", 1]}, {"type": "null"}),
        ({"$ref": "true"}, {"const": "a"}),
        ({"$ref": "a"}, {"const": "a"}),
        (A, A),
        (without("type"), B),
        (without("properties"), B),
        (without("required"), B),
        ({**A, "type": ["object", "null"]}, {**B, "type": ["object", "null"]}),
        (A, of_kind({"const": "b"}, name="other")),
        (A, of_kind({"const": "b"}, name="other", required=["kind", "other"])),
        (A, of_kind({"const": "b"}, required=[])),
        (A, of_kind({"type": "string"})),
        (A, of_kind(True)),
        (of_kind({"const": 1}), of_kind({"const": 1.0})),
    ],
)
def test_schemas_that_may_share_a_value_are_not_disjoint(one: Schema | bool, other: Schema) -> None:
    assert not are_disjoint([one, other], TARGETS.__getitem__)
    assert not are_disjoint([other, one], TARGETS.__getitem__)
