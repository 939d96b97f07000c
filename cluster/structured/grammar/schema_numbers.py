"""The numbers that a JSON schema allows."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from cluster.structured.grammar import json_text
from cluster.structured.grammar.number_ranges import numbers_between
from cluster.structured.grammar.schema_keywords import KEYWORDS, Schema, fail

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.structured.grammar.expressions import Expression

__all__ = ["number_of"]


def number_of(schema: Schema, path: str, *, is_integer: bool) -> Expression:
    """Return the numbers that a schema allows. Raises InvalidRequestError."""
    bounds: dict[str, Fraction] = {}
    for keyword in KEYWORDS["number"].intersection(schema):
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | Fraction):
            fail(f"{path}/{keyword}", "must be a number")
        bound = Fraction(value)
        if abs(bound) > 10**15 or bound.denominator > 10**15:
            fail(f"{path}/{keyword}", "must have at most 15 digits before and after the point")
        bounds[keyword] = bound
    if not bounds:
        return json_text.INTEGER if is_integer else json_text.NUMBER
    low, is_low_open = _closest(bounds, "minimum", "exclusiveMinimum", max)
    high, is_high_open = _closest(bounds, "maximum", "exclusiveMaximum", min)
    return numbers_between(
        low, high, is_low_open=is_low_open, is_high_open=is_high_open, is_integer=is_integer
    )


def _closest(
    bounds: Mapping[str, Fraction], closed: str, opened: str, pick: object
) -> tuple[Fraction | None, bool]:
    found = [bounds[keyword] for keyword in (closed, opened) if keyword in bounds]
    if not found:
        return None, False
    bound = max(found) if pick is max else min(found)
    return bound, bounds.get(opened) == bound
