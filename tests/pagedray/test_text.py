"""Numbers of things in messages."""

from __future__ import annotations

import pytest

from pagedray.text import pluralize, quote, quote_json


def test_only_one_thing_is_singular() -> None:
    assert [pluralize(number, "open call") for number in (0, 1, 2)] == [
        "0 open calls",
        "1 open call",
        "2 open calls",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a" * 1_000_000, f"'{'a' * 36}..."),
        (True, "True"),
        (None, "None"),
        (5, "5"),
        (-(10**5000), "a number of more than 30 digits"),
        (0.5, "0.5"),
        ([1] * 1_000_000, "a list"),
        ((), "a list"),
        ({"a": [1] * 1_000_000}, "an object"),
    ],
    # Pytest would format the numbers.
    ids=map(str, range(10)),
)
def test_text_is_short(value: object, text: str) -> None:
    assert quote(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (False, "false"), (None, "null"), (1, "1"), ("a", "'a'")]
)
def test_text_is_as_in_json(value: object, text: str) -> None:
    assert quote_json(value) == text
