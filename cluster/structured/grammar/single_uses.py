"""Puts the rules of a grammar that are used once where they are used.

xgrammar makes states for each rule, which it compares with those of all rules: grammars of many
rules take long to compile, and much memory.
"""

from collections import Counter

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Alternation,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    size_of,
)

__all__ = ["without_single_uses"]


def without_single_uses(
    rules: dict[str, Expression], start: Expression
) -> tuple[dict[str, Expression], Expression]:
    """Return the rules that are needed, and the start, with the others put in their places.

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
