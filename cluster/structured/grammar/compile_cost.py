"""What a grammar costs to compile, as far as that can be told by looking at it.

xgrammar compares each state of an automaton with the whole vocabulary. That is next to nothing
where few tokens may follow, and tens of milliseconds where most may: those states are counted here.
So are parts that may be left out, since each is followed by any of those behind it in a row: that
is as many ways as the square of their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.structured.grammar.expressions import Characters, Choice, Expression, Repeat, Sequence

__all__ = ["MAX_COST", "MAX_SKIPS", "cost_of", "skips_of"]

MAX_COST = 1024
"""More than this takes longer than anybody waits, whatever the machine and the vocabulary."""
MAX_SKIPS = 256
"""Parts in a row that may be left out; these make some 30 000 ways."""
_MOST_STATES = 192
"""States of a repetition that is counted further than it is unrolled."""
_NUM_WIDE_LETTERS = 16


def cost_of(expression: Expression) -> int:
    """Return the states of an expression in which most tokens may follow; a rule has none."""
    match expression:
        case Characters():
            return int(_is_wide(expression))
        case Sequence(parts) | Choice(parts):
            return sum(map(cost_of, parts))
        case Repeat(part, fewest, most):
            num_rounds = fewest + 1 if most is None else most
            return min(num_rounds, _MOST_STATES) * cost_of(part)
    return 0


def _is_wide(characters: Characters) -> bool:
    letters = (*range(0x41, 0x5B), *range(0x61, 0x7B))
    return (
        sum(any(low <= one <= high for low, high in characters.ranges) for one in letters)
        >= _NUM_WIDE_LETTERS
    )


def skips_of(expression: Expression) -> int:
    """Return how many parts in a row may be left out, at most."""
    return _skips(expression).most


@dataclass(frozen=True, slots=True)
class _Skips:
    """Parts of an expression that may be left out."""

    most: int = 0
    """In a row, wherever."""
    first: int = 0
    """In a row from its beginning; all of them if it may be left out as a whole."""
    last: int = 0
    is_whole: bool = False
    """Whether it may be left out as a whole."""


def _skips(expression: Expression) -> _Skips:
    match expression:
        case Sequence(parts):
            return _skips_of_sequence(parts)
        case Choice(parts):
            found = [_skips(part) for part in parts]
            is_whole = any(one.is_whole for one in found)
            first = max(int(is_whole), *(one.first for one in found))
            last = max(int(is_whole), *(one.last for one in found))
            return _Skips(max(first, last, *(one.most for one in found)), first, last, is_whole)
        case Repeat(part, fewest, most):
            inner = _skips(part)
            num_rounds = fewest + 1 if most is None else most
            if inner.is_whole:
                total = max(1, num_rounds) * max(1, inner.first)
                return _Skips(total, total, total, is_whole=True)
            if fewest == 0:
                return _Skips(max(1, inner.most), 1, 1, is_whole=True)
            between = inner.last + inner.first if num_rounds > 1 else 0
            return _Skips(max(inner.most, between), inner.first, inner.last)
    return _Skips()


def _skips_of_sequence(parts: tuple[Expression, ...]) -> _Skips:
    most = last = 0
    first: int | None = None
    for part in parts:
        inner = _skips(part)
        most = max(most, inner.most, last + inner.first)
        if inner.is_whole:
            last += inner.first
            continue
        if first is None:
            first = last + inner.first
        last = inner.last
    if first is None:
        return _Skips(max(most, last), last, last, is_whole=True)
    return _Skips(max(most, last), first, last)
