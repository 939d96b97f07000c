"""What is between the brackets of arrays and objects: parts, some of which may be missing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import Choice, Expression, Rule, Text, optional
from cluster.structured.grammar.expressions import Sequence as InOrder
from cluster.structured.grammar.json_text import SPACE
from cluster.structured.grammar.schema_words import fail

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["key_of", "leading_items", "members_in_order"]


def members_in_order(
    members: Sequence[Expression], are_required: Sequence[bool], rules: dict[str, Expression]
) -> Expression:
    """Return members in order with commas between those that are there.

    From the last on there are two rules a member: what follows if there is one before it, and,
    unless there must be one, what follows if there is none; they are added to `rules`.
    """
    number = len(rules)
    first_required = are_required.index(True) if True in are_required else len(members)
    behind: Expression = InOrder(())
    alone: Expression = InOrder(())
    for index in range(len(members) - 1, -1, -1):
        member, is_required = members[index], are_required[index]
        with_comma = InOrder((Text(","), SPACE, member))
        if index <= first_required:
            first = InOrder((member, behind))
            rules[f"from{number}x{index}"] = first if is_required else Choice((first, alone))
            alone = Rule(f"from{number}x{index}")
        behind = InOrder((with_comma if is_required else optional(with_comma), behind))
        # Rules of their own, so that what follows is written once.
        rules[f"more{number}x{index}"] = behind
        behind = Rule(f"more{number}x{index}")
    return alone


def leading_items(items: Sequence[Expression], fewest: int, more: Expression) -> Expression:
    """Return items in order, of which those behind the first `fewest` may be missing."""
    following = more
    for index in range(len(items) - 1, -1, -1):
        comma = () if index == 0 else (Text(","), SPACE)
        following = InOrder((*comma, items[index], following))
        if index >= fewest:
            following = optional(following)
    return following


def key_of(name: str, path: str) -> Expression:
    """Return a property's name and the colon behind it."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        fail(f"{path}/properties", "has a name with a lone surrogate, which is no character")
    return InOrder((Text(json.dumps(name, ensure_ascii=False)), Text(":"), SPACE))
