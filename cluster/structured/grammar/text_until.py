"""Free text up to the first of several marks, as the rules of an automaton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Rule,
    complement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_STATES", "text_until"]

MAX_STATES = 128
"""Nearly all tokens may follow each of them, which takes long to compile."""


def text_until(
    stops: Mapping[str, Expression], prefix: str, *, may_end: bool
) -> tuple[dict[str, Expression], Expression]:
    """Return rules, named with a prefix, and text in which no stop occurs, or one at its end.

    The expression of a stop is what follows it. With `may_end`, the text may also end without.
    """
    # A state is the longest end of the text that begins a stop.
    states = {""} | {stop[:length] for stop in stops for length in range(1, len(stop))}
    # Those after a stop are never reached.
    states = {one for one in states if not any(stop in one for stop in stops)}
    names = {state: f"{prefix}{number}" for number, state in enumerate(sorted(states))}
    letters = sorted({letter for stop in stops for letter in stop})
    rules: dict[str, Expression] = {}
    for state, name in names.items():
        branches: list[Expression] = [
            Concat((complement(tuple((ord(one), ord(one)) for one in letters)), Rule(names[""])))
        ]
        for letter in letters:
            text = state + letter
            ended = [follow for stop, follow in stops.items() if text.endswith(stop)]
            read = Characters(((ord(letter), ord(letter)),))
            if ended:
                branches.extend(Concat((read, follow)) for follow in ended)
            else:
                branches.append(Concat((read, Rule(names[_longest_end(text, states)]))))
        if may_end:
            branches.append(Concat(()))
        rules[name] = Alternation(tuple(branches))
    return rules, Rule(names[""])


def _longest_end(text: str, states: set[str]) -> str:
    return next(text[at:] for at in range(len(text) + 1) if text[at:] in states)
