"""What is hopeless to compile is refused by looking at it."""

from __future__ import annotations

import json

import pytest

from cluster.structured.grammar.compile_cost import MAX_SKIPS, skips_of
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from pagedray.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "num_skips"),
    [
        *(("abc", 0), ("a?", 1), ("a?b?c?", 3), ("a?bc?d?", 2), ("a*b*", 2), ("(?:a|)(?:b|)", 2)),
        *(("(?:a?b?)c?", 3), ("(?:a?b?){5}", 10), ("(?:a?b?){2,}", 6), ("(?:a?){2,7}", 7)),
        *(("(?:a?bc?){9}", 2), ("(?:a?b){9}", 1), ("x(?:a?|bc?)y?", 2), ("(?:ab)?", 1)),
        *(("(?:a(?:b?c?)d)?e?", 2), ("a{0,9}", 1), ("a{2,9}", 0), ("", 0)),
    ],
)
def test_parts_in_a_row_that_may_be_left_out_are_counted(text: str, num_skips: int) -> None:
    assert skips_of(read_regex(text)) == num_skips


@pytest.mark.parametrize("text", ["a?" * 2000, "(?:a?){900}", "(?:a|)" * 600])
def test_too_many_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"in a row .* at most {MAX_SKIPS} are"):
        read_regex(text)


@pytest.mark.parametrize(("num_required", "num_optional"), [(257, 0), (0, 129), (200, 57)])
def test_objects_of_too_many_properties_are_refused(num_required: int, num_optional: int) -> None:
    names = [f"p{index}" for index in range(num_required + num_optional)]
    schema = {
        "type": "object",
        "properties": {key: {"type": "null"} for key in names},
        "required": names[:num_required],
    }
    with pytest.raises(InvalidRequestError, match="properties at most"):
        read_json_schema(json.dumps(schema))
