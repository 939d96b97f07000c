"""Lists of parts, of which there may be many, and the leading items of arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Concat,
    Expression,
    Rule,
    Text,
    optional,
    size_of,
)
from cluster.structured.grammar.json_text import COMMA, SPACE, separated, surrounded
from cluster.structured.grammar.loops import MAX_CHAIN, counted_letters

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["enclosed_list", "leading_items", "more_items"]

_MAX_COPIED = 128
"""Characters of a part that is written twice, which takes less memory than a rule."""


def enclosed_list(
    left: str,
    part: Expression,
    right: str,
    *,
    minimum: int,
    maximum: int | None,
    rules: dict[str, Expression],
) -> Expression:
    """Return `minimum` to `maximum` parts separated by commas, between two brackets."""
    part = _short(part, rules)
    if max(minimum, maximum or 0) <= MAX_CHAIN:
        return surrounded(left, separated(part, minimum, maximum), right)
    more = more_items(part, max(minimum - 1, 0), None if maximum is None else maximum - 1, rules)
    some = Concat((part, more))
    return surrounded(left, some if minimum else optional(some), right)


def more_items(
    item: Expression, minimum: int, maximum: int | None, rules: dict[str, Expression]
) -> Expression:
    """Return `minimum` to `maximum` items, each after a comma."""
    following = Concat((*COMMA.parts, _short(item, rules)))
    prefix = f"list{len(rules)}x"
    return counted_letters((following,), minimum, maximum, (), prefix=prefix, rules=rules)


def _short(part: Expression, rules: dict[str, Expression]) -> Expression:
    """Return a part, as a rule if it is long."""
    if size_of(part) <= _MAX_COPIED:
        return part
    rule = Rule(f"item{len(rules)}")
    rules[rule.name] = part
    return rule


def leading_items(items: Sequence[Expression], minimum: int, more: Expression) -> Expression:
    """Return items in order, of which those after the first `minimum` are optional."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = Concat((*comma, items[index], following))
        if index >= minimum:
            following = optional(following)
    return following
