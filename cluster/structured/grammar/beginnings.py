"""Whether a text of a grammar may begin with another text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["may_begin_with"]

Places = frozenset[int]
"""How many characters of the text have been read."""


def may_begin_with(text: str, rules: Mapping[str, Expression], start: Expression) -> bool:
    """Return whether the text is a beginning of one that a grammar accepts.

    Every expression of the grammar accepts some text.
    """
    return len(text) in _Reading(text, rules).after(start, 0)


class _Reading:
    """Finds where expressions end in a text, or at its end those that go on."""

    def __init__(self, text: str, rules: Mapping[str, Expression]) -> None:
        self._text = text
        self._rules = rules
        self._known: dict[tuple[str, int], Places] = {}
        """Of rules, by name and place; those of a rule that is being read are empty."""

    def after(self, expression: Expression, at: int) -> Places:
        """Return the places behind an expression that begins at a place."""
        if at == len(self._text):
            return frozenset((at,))
        match expression:
            case Text(text):
                length = min(len(text), len(self._text) - at)
                is_there = self._text.startswith(text[:length], at)
                return frozenset((at + length,) if is_there else ())
            case Characters(ranges):
                code = ord(self._text[at])
                is_there = any(low <= code <= high for low, high in ranges)
                return frozenset((at + 1,) if is_there else ())
            case Concat(parts):
                places = frozenset((at,))
                for part in parts:
                    places = self._after_each(part, places)
                return places
            case Alternation(parts):
                return frozenset().union(*(self.after(part, at) for part in parts))
            case Repeat(part, minimum, maximum):
                return self._repeated(part, at, minimum, maximum)
            case Rule(name):
                return self._after_rule(name, at)
            case Lookahead():
                return frozenset((at,))

    def _after_each(self, part: Expression, places: Places) -> Places:
        return frozenset().union(*(self.after(part, at) for at in places))

    def _repeated(self, part: Expression, at: int, minimum: int, maximum: int | None) -> Places:
        found: set[int] = set()
        places, number = frozenset((at,)), 0
        # Each repetition that is of use reads a character.
        while places and number <= minimum + len(self._text):
            if number >= minimum:
                found |= places
            if number == maximum or places == {len(self._text)}:
                break
            places, number = self._after_each(part, places), number + 1
        return frozenset(found | (places & {len(self._text)}))

    def _after_rule(self, name: str, at: int) -> Places:
        if (name, at) not in self._known:
            self._known[name, at] = frozenset()
            self._known[name, at] = self.after(self._rules[name], at)
        return self._known[name, at]
