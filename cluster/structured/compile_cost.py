"""What a grammar costs to compile, as far as that can be told by looking at it.

xgrammar compares each state of an automaton with the whole vocabulary. That is next to nothing
where few tokens may follow, and tens of milliseconds where most may: those states are counted here.
"""

from __future__ import annotations

from cluster.structured.expressions import Characters, Choice, Expression, Repeat, Sequence

__all__ = ["MAX_COST", "cost_of"]

MAX_COST = 1024
"""More than this takes longer than anybody waits, whatever the machine and the vocabulary."""
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
