"""Free text up to the first of several marks, as the rules of an automaton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    complement,
)
from cluster.structured.grammar.json_text import SPACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cluster.structured.grammar.expressions import Ranges
    from cluster.structured.grammar.turn import Grammar

__all__ = ["MAX_STATES", "Texts", "other_text", "spaced", "text_until"]

MAX_STATES = 128
"""Nearly all tokens may follow each of them, which takes long to compile."""
_LAST_WHITESPACE = 0x3000
_WHITESPACE = tuple(filter(str.isspace, map(chr, range(_LAST_WHITESPACE + 1))))
"""Whitespace that readers skip, as Python's strip does."""

Texts = tuple[str, ...]
"""Literal texts with optional whitespace between them."""
_State = frozenset[tuple[Texts, int]]
"""The rest of each possible beginning, and how many characters of its first part were read."""


def spaced(texts: Texts) -> Expression:
    """Return the expression of texts."""
    parts: list[Expression] = []
    for text in texts:
        parts += (SPACE, Text(text)) if text else (SPACE,)
    return Concat(tuple(parts[1:]))


def text_until(
    stops: Mapping[str, Expression], prefix: str, *, may_end: bool
) -> tuple[dict[str, Expression], Expression]:
    """Return rules, named with a prefix, and text without a stop, or with a stop at its end.

    The expression of a stop is its continuation. With `may_end`, the text may also end without a
    stop.
    """
    # A state is the longest end of the text that begins a stop.
    states = {""} | {stop[:length] for stop in stops for length in range(1, len(stop))}
    # States after a stop are never reached.
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


def other_text(beginnings: Sequence[Texts]) -> Grammar:
    """Return rules, named `text` and a suffix, and text that has none of these beginnings.

    There may be whitespace before each text of a beginning. The text may be empty.
    """
    anything = Rule("textrest")
    rules: dict[str, Expression] = {anything.name: Repeat(complement(()), 0, None)}
    start = frozenset((beginning, 0) for beginning in beginnings)
    names = {start: "text0"}
    left = [start]
    while left:
        state = left.pop()
        letters = {texts[0][place] for texts, place in state}
        following = {letter: _after(state, letter) for letter in sorted(letters)}
        before_text = frozenset((texts, place) for texts, place in state if not place)
        whitespace = _WHITESPACE if before_text else ()
        others = complement(_ranges((*letters, *whitespace)))
        branches: list[Expression] = [Concat(()), Concat((others, anything))]
        steps = [(_ranges(letter), found) for letter, found in following.items()]
        steps += [(_ranges(whitespace), before_text)] if whitespace else []
        for ranges, found in steps:
            if found is not None:
                if found not in names:
                    names[found] = f"text{len(names)}"
                    left.append(found)
                branches.append(Concat((Characters(ranges), Rule(names[found]))))
        rules[names[state]] = Alternation(tuple(branches))
    return rules, Rule(names[start])


def _after(state: _State, letter: str) -> _State | None:
    """Return the state after a letter, or None if the letter completes a beginning."""
    found: set[tuple[Texts, int]] = set()
    for texts, place in state:
        if texts[0][place] != letter:
            continue
        if place + 1 < len(texts[0]):
            found.add((texts, place + 1))
        elif len(texts) > 1:
            found.add((texts[1:], 0))
        else:
            return None
    return frozenset(found)


def _ranges(characters: Iterable[str]) -> Ranges:
    return tuple((ord(one), ord(one)) for one in sorted(characters))
