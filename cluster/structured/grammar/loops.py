"""Loops of a grammar as xgrammar follows them best.

Where one rule ends and another begins, xgrammar compares tokens with the grammar as they come, and
what is repeated without end is a rule to it: the mask in a loop over words takes milliseconds. Here
a loop becomes a rule that names itself last, with all that comes behind the loop in it. Such rules
are one automaton, which is gone through when the grammar is compiled; a mask takes microseconds.
"""

from __future__ import annotations

from cluster.structured.grammar.expressions import (
    Characters,
    Choice,
    Expression,
    Repeat,
    Rule,
    Sequence,
    Text,
    size_of,
)

__all__ = ["with_loops_as_rules"]

_MOST_CHARACTERS = 256
"""A repetition of more characters, counted as often as they may come, is left as it is."""


def with_loops_as_rules(
    expression: Expression, *, prefix: str = "loop"
) -> tuple[dict[str, Expression], Expression]:
    """Return rules, named with a prefix, and an expression of them that says the same."""
    writer = _Writer(prefix)
    start = writer.followed(expression, Sequence(()))
    return writer.rules, start


class _Writer:
    """Writes from the end to the beginning, since what is behind a loop belongs to its rule."""

    def __init__(self, prefix: str) -> None:
        self.rules: dict[str, Expression] = {}
        self._prefix = prefix

    def followed(self, expression: Expression, behind: Expression) -> Expression:
        """Return an expression with what is behind it."""
        if not _has_loop(expression):
            return _joined(expression, behind)
        match expression:
            case Sequence(parts):
                for part in reversed(parts):
                    behind = self.followed(part, behind)
                return behind
            case Choice(parts):
                behind = self._named(behind)
                return Choice(tuple(self.followed(part, behind) for part in parts))
            case Repeat(part, fewest, int(most)) if most * size_of(part) <= _MOST_CHARACTERS:
                return self._counted(part, fewest, most, behind)
            case Repeat(part, fewest, None) if self._may_unfold(expression):
                again = self._new_rule()
                first = self.followed(part, again)
                if not fewest:
                    self.rules[again.name] = Choice((first, behind))
                    return again
                # What is there once at least is written once.
                loop = self._named(first)
                self.rules[again.name] = Choice((loop, behind))
                following: Expression = loop
                for _ in range(fewest - 1):
                    following = self.followed(part, following)
                return following
        return _joined(expression, behind)

    def _may_unfold(self, loop: Repeat) -> bool:
        # One that may go round without a character never ends.
        return not _may_be_empty(loop.part) and (
            loop.fewest <= 1 or size_of(loop) <= _MOST_CHARACTERS
        )

    def _counted(self, part: Expression, fewest: int, most: int, behind: Expression) -> Expression:
        behind = following = self._named(behind)
        for round_ in range(most - 1, -1, -1):
            following = self.followed(part, following)
            if round_ >= fewest:
                following = Choice((following, behind))
            if round_:
                following = self._named(following)
        return following

    def _named(self, expression: Expression) -> Expression:
        """Return a rule for what is to be written more than once."""
        if isinstance(expression, Rule | Characters | Text) or expression == Sequence(()):
            return expression
        rule = self._new_rule()
        self.rules[rule.name] = expression
        return rule

    def _new_rule(self) -> Rule:
        rule = Rule(f"{self._prefix}{len(self.rules)}")
        # Its place, which nested loops must not take.
        self.rules[rule.name] = rule
        return rule


def _joined(expression: Expression, behind: Expression) -> Expression:
    if behind == Sequence(()):
        return expression
    if isinstance(behind, Sequence):
        return Sequence((expression, *behind.parts))
    return Sequence((expression, behind))


def _has_loop(expression: Expression) -> bool:
    """Whether anything is repeated, other than single characters without end."""
    match expression:
        case Sequence(parts) | Choice(parts):
            return any(map(_has_loop, parts))
        case Repeat(part, _, most):
            return most is not None or not isinstance(part, Characters)
    return False


def _may_be_empty(expression: Expression) -> bool:
    match expression:
        case Text(text):
            return not text
        case Sequence(parts):
            return all(map(_may_be_empty, parts))
        case Choice(parts):
            return any(map(_may_be_empty, parts))
        case Repeat(part, fewest, _):
            return not fewest or _may_be_empty(part)
        case Rule():
            # It is not known.
            return True
    return False
