"""Estimates what a grammar costs to compile, without compiling it.

xgrammar checks each state of an automaton against the whole vocabulary. That is cheap where few
tokens may follow, and takes tens of milliseconds where most may: those states are counted here.
So are consecutive optional parts, since any of them may be followed by any later one: transitions
grow with the square of their number.
"""

from dataclasses import dataclass

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
)

__all__ = ["MAX_COST", "MAX_OPTIONAL_RUN", "cost_of", "optional_run_of"]

MAX_COST = 1024
"""More states than this take too long to compile on any machine, with any vocabulary."""
MAX_OPTIONAL_RUN = 256
"""Consecutive optional parts; these make about 30 000 transitions."""
_MAX_STATES = 192
"""States counted for one repetition: xgrammar does not unroll longer ones."""
_NUM_WIDE_LETTERS = 16


def cost_of(expression: Expression) -> int:
    """Return the number of states in which most tokens may follow; a rule counts as none."""
    match expression:
        case Characters():
            return int(_is_wide(expression))
        case Concat(parts) | Alternation(parts):
            return sum(map(cost_of, parts))
        case Repeat(part, minimum, maximum):
            num_rounds = minimum + 1 if maximum is None else maximum
            return min(num_rounds, _MAX_STATES) * cost_of(part)
    return 0


def _is_wide(characters: Characters) -> bool:
    letters = (*range(0x41, 0x5B), *range(0x61, 0x7B))
    found = sum(any(low <= one <= high for low, high in characters.ranges) for one in letters)
    return found >= _NUM_WIDE_LETTERS


def optional_run_of(expression: Expression) -> int:
    """Return the length of the longest run of optional parts."""
    return _run(expression).longest


@dataclass(frozen=True, slots=True)
class _OptionalRun:
    """Numbers of consecutive optional parts in an expression."""

    longest: int = 0
    """The longest run anywhere in the expression."""
    first: int = 0
    """The run at its beginning; all parts if the whole expression is optional."""
    last: int = 0
    """The run at its end."""
    is_whole: bool = False
    """Whether the whole expression is optional."""


def _run(expression: Expression) -> _OptionalRun:
    match expression:
        case Concat(parts):
            return _run_of_concat(parts)
        case Alternation(parts):
            found = [_run(part) for part in parts]
            is_whole = any(one.is_whole for one in found)
            first = max(int(is_whole), *(one.first for one in found))
            last = max(int(is_whole), *(one.last for one in found))
            longest = max(first, last, *(one.longest for one in found))
            return _OptionalRun(longest, first, last, is_whole)
        case Repeat(part, minimum, maximum):
            inner = _run(part)
            num_rounds = minimum + 1 if maximum is None else maximum
            if inner.is_whole:
                total = max(1, num_rounds) * max(1, inner.first)
                return _OptionalRun(total, total, total, is_whole=True)
            if minimum == 0:
                return _OptionalRun(max(1, inner.longest), 1, 1, is_whole=True)
            between = inner.last + inner.first if num_rounds > 1 else 0
            return _OptionalRun(max(inner.longest, between), inner.first, inner.last)
    return _OptionalRun()


def _run_of_concat(parts: tuple[Expression, ...]) -> _OptionalRun:
    longest = last = 0
    first: int | None = None
    for part in parts:
        inner = _run(part)
        longest = max(longest, inner.longest, last + inner.first)
        if inner.is_whole:
            last += inner.first
            continue
        if first is None:
            first = last + inner.first
        last = inner.last
    if first is None:
        return _OptionalRun(max(longest, last), last, last, is_whole=True)
    return _OptionalRun(max(longest, last), first, last)
