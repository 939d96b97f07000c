"""The members of an object: which of them a text contains, and in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Rule,
    optional,
    size_of,
)
from cluster.structured.grammar.json_text import COMMA

__all__ = ["Member", "members_in_order"]

_MAX_COPIED = 128
"""Characters of a member that is written twice, which takes less memory than a rule."""


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

    `rules` gets rules for parts of them, most of which are used once.
    """
    add = _Rules(rules)
    if not any(are_required):
        return _any_of(members, add, separator)
    first = are_required.index(True)
    found: Expression = Concat(())
    for member, is_required in zip(members[:first:-1], are_required[:first:-1], strict=True):
        more = Concat((*separator.parts, member))
        found = add.rule(Concat((more if is_required else optional(more), found)))
    found = Concat((members[first], found))
    for member in members[first - 1 :: -1] if first else ():
        found = add.rule(Concat((optional(Concat((member, *separator.parts))), found)))
    return found


def _any_of(members: Sequence[Expression], add: "_Rules", separator: Concat) -> Expression:
    """Return members in order, any of which may be omitted."""
    found: Expression | None = None
    for member in reversed(members):
        if found is None:
            found = add.rule(member)
            continue
        # Without groups, of which xgrammar would make rules.
        one = member if size_of(member) <= _MAX_COPIED else add.rule(member)
        found = add.rule(Alternation((one, Concat((one, *separator.parts, found)), found)))
    return Concat(()) if found is None else optional(found)


class _Rules:
    """Adds rules for the members of one object."""

    def __init__(self, rules: dict[str, Expression]) -> None:
        self._rules = rules
        self._number = len(rules)

    def rule(self, expression: Expression) -> Rule:
        """Add a rule and return a reference to it."""
        rule = Rule(f"from{self._number}x{len(self._rules) - self._number}")
        self._rules[rule.name] = expression
        return rule
