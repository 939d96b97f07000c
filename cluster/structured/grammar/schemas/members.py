"""The members of an object: which of them a text contains, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Rule,
    optional,
)
from cluster.structured.grammar.json_text import COMMA

__all__ = ["Member", "members_in_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A property that an object may have."""

    name: str
    schema: object
    path: str
    """The JSON pointer of its schema."""
    value: Expression
    """Its value as JSON."""
    is_required: bool


def members_in_order(
    members: Sequence[Expression],
    are_required: Sequence[bool],
    rules: dict[str, Expression],
    *,
    separator: Concat = COMMA,
) -> Expression:
    """Return members in order with a separator; those that are not required may be omitted.

    `rules` gets one rule for each member: that member or a later one, and those that follow. The
    compiled grammar has a copy of all states for each rule, so more rules would make it larger.
    """
    number = len(rules)
    remaining: Expression = Concat(())
    following: Expression = Concat(())
    may_end = True
    for index in range(len(members) - 1, -1, -1):
        chosen: Expression = Concat((members[index], following))
        if index < len(members) - 1 and not are_required[index]:
            chosen = Alternation((chosen, remaining))
        remaining = Rule(f"from{number}x{index}")
        rules[remaining.name] = chosen
        more = Concat((*separator.parts, remaining))
        may_end = may_end and not are_required[index]
        following = optional(more) if may_end else more
    return optional(remaining) if may_end else remaining
