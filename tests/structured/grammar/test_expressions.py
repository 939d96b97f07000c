"""Structures that cost too much to compile are rejected before they are compiled."""

from __future__ import annotations

import json

import pytest

from cluster.structured.grammar.expressions import MAX_OPTIONAL_RUN, optional_run_of
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from pagedray.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "length"),
    [
        *(("abc", 0), ("a?", 1), ("a?b?c?", 3), ("a?bc?d?", 2), ("a*b*", 2), ("(?:a|)(?:b|)", 2)),
        *(("(?:a?b?)c?", 3), ("(?:a?b?){5}", 10), ("(?:a?b?){2,}", 6), ("(?:a?){2,7}", 7)),
        *(("(?:a?bc?){9}", 2), ("(?:a?b){9}", 1), ("x(?:a?|bc?)y?", 2), ("(?:ab)?", 1)),
        *(("(?:a(?:b?c?)d)?e?", 2), ("a{0,9}", 1), ("a{2,9}", 0), ("", 0)),
    ],
)
def test_optional_parts_in_a_row_are_counted(text: str, length: int) -> None:
    assert optional_run_of(read_regex(text)) == length


@pytest.mark.parametrize("text", ["a?" * 2000, "(?:a?){900}", "(?:a|)" * 600])
def test_too_many_optional_parts_are_rejected(text: str) -> None:
    message = rf"\d+ optional parts in a row, more than the maximum of {MAX_OPTIONAL_RUN}\."
    with pytest.raises(InvalidRequestError, match=message):
        read_regex(text)


@pytest.mark.parametrize(
    ("num_required", "num_optional", "limit"),
    [
        (257, 0, r"256 properties\."),
        (0, 129, r"128 properties that are not required\."),
        (200, 57, r"256 properties\."),
    ],
)
def test_objects_of_too_many_properties_are_rejected(
    num_required: int, num_optional: int, limit: str
) -> None:
    names = [f"p{index}" for index in range(num_required + num_optional)]
    schema = {
        "type": "object",
        "properties": {key: {"type": "null"} for key in names},
        "required": names[:num_required],
    }
    with pytest.raises(InvalidRequestError, match=f"#/properties must have at most {limit}"):
        read_json_schema(json.dumps(schema))
