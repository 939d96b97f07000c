"""The content of arrays and objects: items and members, some of them optional."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Rule,
    Text,
    optional,
)
from cluster.structured.grammar.json_text import SPACE
from cluster.structured.grammar.schema_keywords import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["key_of", "leading_items", "members_in_order"]


def members_in_order(
    members: Sequence[Expression], are_required: Sequence[bool], rules: dict[str, Expression]
) -> Expression:
    """Return members in order, separated by commas; those not required may be omitted.

    Each member has two rules, which are added to `rules`: `more` for it and those after it where
    another member precedes it, and `from` where none does.
    """
    number = len(rules)
    first_required = are_required.index(True) if True in are_required else len(members)
    rest: Expression = Concat(())
    alone: Expression = Concat(())
    for index in range(len(members) - 1, -1, -1):
        member, is_required = members[index], are_required[index]
        with_comma = Concat((Text(","), SPACE, member))
        if index <= first_required:
            first = Concat((member, rest))
            rules[f"from{number}x{index}"] = first if is_required else Alternation((first, alone))
            alone = Rule(f"from{number}x{index}")
        rest = Concat((with_comma if is_required else optional(with_comma), rest))
        # As a rule, so that the rest is written once.
        rules[f"more{number}x{index}"] = rest
        rest = Rule(f"more{number}x{index}")
    return alone


def leading_items(items: Sequence[Expression], minimum: int, more: Expression) -> Expression:
    """Return items in order, of which those after the first `minimum` are optional."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = Concat((*comma, items[index], following))
        if index >= minimum:
            following = optional(following)
    return following


def key_of(name: str, path: str) -> Expression:
    """Return a property's name and the colon after it."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        fail(f"{path}/properties", "has a name with a lone surrogate")
    return Concat((Text(json.dumps(name, ensure_ascii=False)), Text(":"), SPACE))
