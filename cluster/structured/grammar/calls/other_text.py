"""Text that does not begin as calls do, as the rules of an automaton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    complement,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.structured.grammar.calls.texts import Texts
    from cluster.structured.grammar.expressions import Ranges
    from cluster.structured.grammar.turn import Grammar

    _State = frozenset[tuple[Texts, int]]
    """What is left of the beginnings that the text may have, and how many characters of the first
    part of it the text has."""

__all__ = ["other_text"]

_LAST_WHITESPACE = 0x3000
_WHITESPACE = tuple(filter(str.isspace, map(chr, range(_LAST_WHITESPACE + 1))))
"""What readers skip, as Python's strip does."""


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
