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
    """Finds where expressions end in a text, or which of them continue at its end."""

    def __init__(self, text: str, rules: Mapping[str, Expression]) -> None:
        self._text = text
        self._rules = rules
        self._known: dict[tuple[int, int], Places] = {}
        """Places by expression (its `id`) and place; empty for those that are being read."""

    def after(self, expression: Expression, at: int) -> Places:
        """Return the places after an expression that begins at a place."""
        if at == len(self._text):
            return frozenset((at,))
        key = id(expression), at
        if key not in self._known:
            self._known[key] = frozenset()
            self._known[key] = self._read(expression, at)
        return self._known[key]

    def _read(self, expression: Expression, at: int) -> Places:
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
                return self.after(self._rules[name], at)
            case Lookahead():
                return frozenset((at,))

    def _after_each(self, part: Expression, places: Places) -> Places:
        return frozenset().union(*(self.after(part, at) for at in places))

    def _repeated(self, part: Expression, at: int, minimum: int, maximum: int | None) -> Places:
        found: set[int] = set()
        places = frozenset((at,))
        for number in range(minimum + len(self._text) + 1):
            if number >= minimum:
                found |= places
            following = self._after_each(part, places)
            if number == maximum or following == places:
                # More of them lead nowhere else.
                return frozenset(found | (following if number < minimum else places))
            places = following
        return frozenset(found)
