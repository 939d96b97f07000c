"""Shares the equal parts of a grammar as rules, and inlines rules with a single use.

xgrammar makes rules of alternatives and repetitions, compares the states of each rule with all
other rules, and writes the states of the whole grammar once for each rule of a compiled grammar:
fewer rules take less time and memory.
"""

from __future__ import annotations

from collections import Counter

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    replaced,
    size_of,
)

__all__ = ["inline_rules", "with_shared_parts"]


def with_shared_parts(
    rules: dict[str, Expression], start: Expression, prefix: str
) -> tuple[dict[str, Expression], Expression]:
    """Return an equal grammar in which equal rules, and equal parts, are one rule.

    The names of rules that are added begin with `prefix`.
    """
    rules, start = _with_distinct_rules(rules, start)
    parts = _Parts((*rules.values(), start), prefix)
    shared: dict[str, Expression] = {}
    for name, expression in rules.items():
        body = parts.without_shared(expression)
        shared |= parts.take_rules()
        shared[name] = body
    start = parts.without_shared(start)
    return shared | parts.take_rules(), start


def _with_distinct_rules(
    rules: dict[str, Expression], start: Expression
) -> tuple[dict[str, Expression], Expression]:
    """Return the rules without duplicates of earlier rules."""
    names: dict[Expression, str] = {}
    instead: dict[str, Rule] = {}

    def renamed(expression: Expression) -> Expression | None:
        return instead.get(expression.name) if isinstance(expression, Rule) else None

    for name, expression in rules.items():
        found = names.setdefault(replaced(expression, renamed), name)
        if found != name:
            instead[name] = Rule(found)
    # A recursive rule is used before it is read.
    distinct = {
        name: replaced(expression, renamed)
        for name, expression in rules.items()
        if name not in instead
    }
    return distinct, replaced(start, renamed)


class _Parts:
    """The parts of a grammar that become rules."""

    def __init__(self, expressions: tuple[Expression, ...], prefix: str) -> None:
        self._prefix = prefix
        self._uses: Counter[Expression] = Counter()
        self._shared: dict[Expression, Rule] = {}
        self._added: dict[str, Expression] = {}
        for expression in expressions:
            self._count(expression)

    def without_shared(self, expression: Expression) -> Expression:
        """Return an expression with references to the rules of shared parts."""
        return replaced(expression, self._shared_rule)

    def take_rules(self) -> dict[str, Expression]:
        """Return the rules that were added since the last call."""
        added, self._added = self._added, {}
        return added

    def _count(self, expression: Expression) -> None:
        if _may_be_shared(expression):
            self._uses[expression] += 1
            if self._uses[expression] > 1:
                return
        for part in _parts_of(expression):
            self._count(part)

    def _shared_rule(self, expression: Expression) -> Rule | None:
        if not (_may_be_shared(expression) and self._uses[expression] > 1):
            return None
        if expression not in self._shared:
            body = _with_parts(expression, tuple(map(self.without_shared, _parts_of(expression))))
            rule = Rule(f"{self._prefix}{len(self._shared)}")
            self._shared[expression] = rule
            self._added[rule.name] = body
        return self._shared[expression]


def _may_be_shared(expression: Expression) -> bool:
    """Return whether a part is a rule to xgrammar, too, and does not match single characters.

    Single characters are compiled for each place, as tokens may span them.
    """
    return isinstance(expression, Alternation | Repeat) and not _has_characters(expression)


def _has_characters(expression: Expression) -> bool:
    if isinstance(expression, Characters | Lookahead):
        return True
    return any(map(_has_characters, _parts_of(expression)))


def _parts_of(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Concat(parts) | Alternation(parts):
            return parts
        case Repeat(part) | Lookahead(part):
            return (part,)
    return ()


def _with_parts(expression: Expression, parts: tuple[Expression, ...]) -> Expression:
    match expression:
        case Alternation():
            return Alternation(parts)
        case Repeat(_, minimum, maximum):
            (part,) = parts
            return Repeat(part, minimum, maximum)
    raise AssertionError


def inline_rules(
    rules: dict[str, Expression], start: Expression
) -> tuple[dict[str, Expression], Expression]:
    """Return the needed rules, and the start, with the other rules inlined.

    A rule is used by those after it, or by itself.
    """
    uses = _uses_of(rules, start)
    single = {name for name in rules if uses[name] == 1 and not _has_lookahead(rules[name])}
    bodies: dict[str, Expression] = {}
    for name, expression in rules.items():
        bodies[name] = _filled(expression, bodies, single)
    start = _filled(start, bodies, single)
    kept = _uses_of(bodies, start)
    return {name: body for name, body in bodies.items() if kept[name]}, start


def _filled(expression: Expression, bodies: dict[str, Expression], single: set[str]) -> Expression:
    filled = _with_bodies(expression, bodies, single)
    return filled if size_of(filled) <= MAX_SIZE else expression


def _with_bodies(
    expression: Expression, bodies: dict[str, Expression], single: set[str]
) -> Expression:
    match expression:
        case Rule(name):
            return bodies.get(name, expression) if name in single else expression
        case Concat(parts):
            inside: list[Expression] = []
            for part in parts:
                filled = _with_bodies(part, bodies, single)
                inside += filled.parts if isinstance(filled, Concat) else (filled,)
            return Concat(tuple(inside))
        case Alternation(parts):
            return Alternation(tuple(_with_bodies(part, bodies, single) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(_with_bodies(part, bodies, single), minimum, maximum)
    return expression


def _uses_of(rules: dict[str, Expression], start: Expression) -> Counter[str]:
    """Return how often each rule is used, by rules that are used themselves."""
    uses: Counter[str] = Counter()
    reached: list[Expression] = [start]
    while reached:
        for name, number in _names_in(reached.pop()).items():
            if not uses[name]:
                reached.append(rules[name])
            uses[name] += number
    return uses


def _names_in(expression: Expression, number: int = 1) -> Counter[str]:
    """Return the rules in an expression, each as often as the compiled grammar has it."""
    match expression:
        case Rule(name):
            return Counter({name: number})
        case Concat(parts) | Alternation(parts):
            found: Counter[str] = Counter()
            for part in parts:
                found.update(_names_in(part, number))
            return found
        case Repeat(part, minimum, maximum):
            return _names_in(part, number if (minimum, maximum) in ((0, 1), (0, None)) else 2)
        case Lookahead(part):
            return _names_in(part, 2)
    return Counter()


def _has_lookahead(expression: Expression) -> bool:
    match expression:
        case Lookahead():
            return True
        case Concat(parts) | Alternation(parts):
            return any(map(_has_lookahead, parts))
        case Repeat(part):
            return _has_lookahead(part)
    return False
