"""Makes a rule of each part that occurs several times in a grammar.

xgrammar makes rules of alternatives and repetitions, and writes the states of the whole grammar
once for each rule of a compiled one: equal parts as one rule take less time and memory.
"""

from collections import Counter

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    replaced,
)

__all__ = ["with_shared_parts"]


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
    """Return the rules without those that equal an earlier one."""
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

    Those are compiled for each place, as tokens may span them.
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
