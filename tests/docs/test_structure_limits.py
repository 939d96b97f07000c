"""The limits of structures in the documentation are those that are enforced."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

import pytest

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray import Structure
from pagedray.errors import InvalidRequestError
from tests.system.server_process import ROOT

_ROW = re.compile(
    r"^\| (.+?) \| ([0-9][0-9 ]*(?:; [0-9][0-9 ]*)*)(?: characters)? \|$", re.MULTILINE
)


def _regex(text: str) -> Structure:
    return Structure(kind="regex", text=text)


def _choices(number: int) -> Structure:
    return Structure(kind="choice", text=json.dumps([f"a{index}" for index in range(number)]))


def _schema(**fields: object) -> Structure:
    return Structure(kind="json_schema", text=json.dumps(fields))


def _object(number: int, *, is_required: bool) -> Structure:
    names = [f"a{index}" for index in range(number)]
    return _schema(
        type="object",
        properties={name: {"type": "null"} for name in names},
        required=names if is_required else [],
    )


_MADE: Mapping[str, Callable[[int], Structure]] = {
    "characters of a regular expression": lambda number: _regex(number * "a"),
    "with repetitions expanded": lambda number: _regex(f"(?:{number // 1000 * 'a'}){{1000}}"),
    "nested groups of a regular expression": lambda number: _regex(
        number * "(" + "a" + number * ")"
    ),
    "repeat count": lambda number: _regex(f"a{{{number}}}"),
    "choices": _choices,
    "schemas of a `oneOf`": lambda number: _schema(
        oneOf=[{"const": f"a{one}"} for one in range(number)]
    ),
    "properties of an object": lambda number: _object(number, is_required=True),
    "properties that are not required": lambda number: _object(number, is_required=False),
}
"""Structures of a size, by the limit in the table."""


def _documented() -> dict[str, int]:
    text = (ROOT / "docs" / "structured-output.md").read_text()
    return {
        name: int(limit.replace(" ", ""))
        for names, limits in _ROW.findall(text)
        for name, limit in zip(names.split("; "), limits.split("; "), strict=True)
        if name in _MADE
    }


def test_the_table_has_the_limits() -> None:
    assert _documented().keys() == _MADE.keys()


@pytest.mark.parametrize("name", _MADE)
def test_the_limit_is_the_documented_one(name: str) -> None:
    limit = _documented()[name]
    # A repeated group has a multiple of 1000 characters.
    step = 1000 if "expanded" in name else 1
    assert grammar_text(_MADE[name](limit))
    with pytest.raises(InvalidRequestError):
        grammar_text(_MADE[name](limit + step))
