"""Rewrites loops into right-recursive rules, for which xgrammar makes masks fastest.

xgrammar turns a loop into a rule, and checks tokens that cross the end of a rule when it makes a
mask: in a loop over words that takes milliseconds. Here a loop becomes a right-recursive rule that
includes everything after the loop. Such rules are one automaton, for which xgrammar precomputes the
tokens when it compiles; a mask takes microseconds.
"""

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    size_of,
)

__all__ = ["with_loops_as_rules"]

_MAX_UNROLLED = 256
"""A repetition that expands to more characters is not unrolled."""


def with_loops_as_rules(
    expression: Expression, *, prefix: str = "loop"
) -> tuple[dict[str, Expression], Expression]:
    """Return rules, named with a prefix, and an equivalent expression that refers to them."""
    writer = _LoopRewriter(prefix)
    start = writer.followed(expression, Concat(()))
    return writer.rules, start


class _LoopRewriter:
    """Works from the end to the beginning, since the rule of a loop includes what follows it."""

    def __init__(self, prefix: str) -> None:
        self.rules: dict[str, Expression] = {}
        self._prefix = prefix

    def followed(self, expression: Expression, rest: Expression) -> Expression:
        """Return an expression followed by `rest`."""
        if not _has_loop(expression):
            return _joined(expression, rest)
        match expression:
            case Concat(parts):
                for part in reversed(parts):
                    rest = self.followed(part, rest)
                return rest
            case Alternation(parts):
                rest = self._named(rest)
                return Alternation(tuple(self.followed(part, rest) for part in parts))
            case Repeat(part, minimum, int(maximum)) if maximum * size_of(part) <= _MAX_UNROLLED:
                return self._counted(part, minimum, maximum, rest)
            case Repeat(part, minimum, None) if self._may_unfold(expression):
                again = self._new_rule()
                first = self.followed(part, again)
                if not minimum:
                    self.rules[again.name] = Alternation((first, rest))
                    return again
                # The first iteration is required.
                loop = self._named(first)
                self.rules[again.name] = Alternation((loop, rest))
                following: Expression = loop
                for _ in range(minimum - 1):
                    following = self.followed(part, following)
                return following
        return _joined(expression, rest)

    def _may_unfold(self, loop: Repeat) -> bool:
        # An iteration that may be empty would recurse without end.
        return not _may_be_empty(loop.part) and (
            loop.minimum <= 1 or size_of(loop) <= _MAX_UNROLLED
        )

    def _counted(
        self, part: Expression, minimum: int, maximum: int, rest: Expression
    ) -> Expression:
        rest = following = self._named(rest)
        for round_ in range(maximum - 1, -1, -1):
            following = self.followed(part, following)
            if round_ >= minimum:
                following = Alternation((following, rest))
            if round_:
                following = self._named(following)
        return following

    def _named(self, expression: Expression) -> Expression:
        """Return a rule for an expression that is used more than once."""
        if isinstance(expression, Rule | Characters | Text) or expression == Concat(()):
            return expression
        rule = self._new_rule()
        self.rules[rule.name] = expression
        return rule

    def _new_rule(self) -> Rule:
        rule = Rule(f"{self._prefix}{len(self.rules)}")
        # Reserves the name, which nested loops must not take.
        self.rules[rule.name] = rule
        return rule


def _joined(expression: Expression, rest: Expression) -> Expression:
    if rest == Concat(()):
        return expression
    if isinstance(rest, Concat):
        return Concat((expression, *rest.parts))
    return Concat((expression, rest))


def _has_loop(expression: Expression) -> bool:
    """Return whether anything is repeated, other than single characters without limit."""
    match expression:
        case Concat(parts) | Alternation(parts):
            return any(map(_has_loop, parts))
        case Repeat(part, _, maximum):
            return maximum is not None or not isinstance(part, Characters)
    return False


def _may_be_empty(expression: Expression) -> bool:
    match expression:
        case Text(text):
            return not text
        case Concat(parts):
            return all(map(_may_be_empty, parts))
        case Alternation(parts):
            return any(map(_may_be_empty, parts))
        case Repeat(part, minimum, _):
            return not minimum or _may_be_empty(part)
        case Rule():
            # Rules are not looked up.
            return True
    return False
