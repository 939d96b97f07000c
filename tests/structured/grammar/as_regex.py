"""Writes expressions for Python's `re`, independently of how we write them for xgrammar."""

from __future__ import annotations

import re

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Text,
)


def as_regex(expression: Expression) -> str:
    """Return a pattern of the texts of an expression without rules."""
    match expression:
        case Text(text):
            return re.escape(text)
        case Characters(ranges):
            return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"
        case Concat(parts):
            return "".join(map(as_regex, parts))
        case Alternation(parts):
            return "(?:" + "|".join(map(as_regex, parts)) + ")"
        case Repeat(part, fewest, most):
            return f"(?:{as_regex(part)}){{{fewest},{'' if most is None else most}}}"
    raise AssertionError(expression)
