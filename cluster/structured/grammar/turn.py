"""A turn of tool calls or an answer of another structure, and free text up to a mark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.structured.grammar.expressions import (
    JSON_RULES,
    SPACE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    complement,
    invalid_structure,
    replaced,
)
from cluster.structured.grammar.json_schema import read_json_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from cluster.structured.grammar.expressions import Ranges

__all__ = [
    "MAX_STATES",
    "CallForm",
    "Grammar",
    "MessageForm",
    "MessagesStructure",
    "Texts",
    "TurnStructure",
    "may_begin_with",
    "other_text",
    "read_messages",
    "read_turn",
    "spaced",
    "text_until",
    "under_prefix",
]

_ANSWER = "answer"
Grammar = tuple[dict[str, Expression], Expression]
"""The rules of a grammar, and where it starts."""
Places = frozenset[int]
"""How many characters of the text have been read."""

MAX_STATES = 128
"""Nearly all tokens may follow each of them, which takes long to compile."""
_LAST_WHITESPACE = 0x3000
_WHITESPACE = tuple(filter(str.isspace, map(chr, range(_LAST_WHITESPACE + 1))))
"""Whitespace that readers skip, as Python's strip does."""
Texts = tuple[str, ...]
"""Literal texts with optional whitespace between them."""
_State = frozenset[tuple[Texts, int]]
"""The rest of each possible beginning, and how many characters of its first part were read."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """The text around calls that are JSON objects, as the model was trained to write it."""

    mark: str
    """How calls begin; it may be a special token."""
    opening: str = ""
    """The text after the mark."""
    separator: str
    closing: str = ""
    arguments: str = "arguments"
    """The key of the arguments."""


class TurnStructure(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a structure of this kind, as JSON."""

    form: CallForm
    call: str
    """The JSON schema of a call."""
    is_parallel: bool
    """Whether there may be several calls."""
    answer_kind: str
    answer_text: str


class MessageForm(msgspec.Struct, frozen=True, array_like=True):
    """One kind of message that a turn may be."""

    opening: str
    """The text that stands for its header, different for each."""
    kind: str
    text: str
    """The kind and the text of its structure."""


class MessagesStructure(msgspec.Struct, frozen=True, array_like=True):
    """The text of a structure of this kind, as JSON: a message of one of several kinds."""

    messages: tuple[MessageForm, ...]


def read_messages(text: str, read_one: Callable[[str, str], Grammar]) -> Grammar:
    """Return the grammar; `read_one` returns that of a kind and a text.

    Raises InvalidRequestError.
    """
    try:
        given = msgspec.json.decode(text, type=MessagesStructure)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is not a valid list of messages: {error}.") from error
    rules: dict[str, Expression] = {}
    messages: list[Expression] = []
    for number, message in enumerate(given.messages):
        grammar = read_one(message.kind, message.text)
        own_rules, start = under_prefix(grammar, f"message{number}")
        rules |= own_rules
        messages.append(Concat((Text(message.opening), start)))
    return rules, Alternation(tuple(messages))


def read_turn(text: str, read_answer: Callable[[str, str], Grammar]) -> Grammar:
    """Return the grammar; `read_answer` returns that of a kind and a text.

    Raises InvalidRequestError.
    """
    try:
        turn = msgspec.json.decode(text, type=TurnStructure)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is not a valid turn: {error}.") from error
    rules, call = read_json_schema(turn.call)
    form = turn.form
    grammar = read_answer(turn.answer_kind, turn.answer_text)
    if may_begin_with(form.mark, *grammar):
        raise invalid_structure(
            f"structure may begin with {form.mark!r}, as tool calls do, and cannot be combined "
            "with tools; have it begin with another text."
        )
    answer_rules, answer = under_prefix(grammar, _ANSWER)
    rules |= answer_rules
    more = Repeat(Concat((Text(form.separator), call)), 0, None)
    calls = Concat(
        (
            Text(form.mark + form.opening),
            call,
            *((more,) if turn.is_parallel else ()),
            *((Text(form.closing),) if form.closing else ()),
        )
    )
    return rules, Alternation((calls, answer))


def under_prefix(grammar: Grammar, prefix: str, *, shared: Container[str] = JSON_RULES) -> Grammar:
    """Return a grammar with own names for its rules, except rules that all parts share."""

    def own_name(name: str) -> str:
        return name if name in shared else f"{prefix}{name}"

    def renamed(expression: Expression) -> Expression | None:
        return Rule(own_name(expression.name)) if isinstance(expression, Rule) else None

    rules, start = grammar
    own = {own_name(name): replaced(one, renamed) for name, one in rules.items()}
    return own, replaced(start, renamed)


def may_begin_with(text: str, rules: Mapping[str, Expression], start: Expression) -> bool:
    """Return whether a grammar accepts some text that begins with this text.

    Every expression of the grammar accepts some text.
    """
    return len(text) in _Reading(text, rules).after(start, 0)


class _Reading:
    """Finds where expressions end in a text, or which of them continue at its end."""

    def __init__(self, text: str, rules: Mapping[str, Expression]) -> None:
        self._text = text
        self._rules = rules
        self._known: dict[tuple[int, int], Places] = {}
        """Places by expression (its `id`) and place; empty while being read."""

    def after(self, expression: Expression, at: int) -> Places:
        """Return the places after an expression that begins at a place."""
        if at == len(self._text):
            return frozenset((at,))
        key = id(expression), at
        if key not in self._known:
            self._known[key] = frozenset()
            self._known[key] = self._read(expression, at)
        return self._known[key]

    def _read(self, expression: Expression, at: int) -> Places:
        match expression:
            case Text(text):
                length = min(len(text), len(self._text) - at)
                is_there = self._text.startswith(text[:length], at)
                return frozenset((at + length,) if is_there else ())
            case Characters(ranges):
                code = ord(self._text[at])
                is_there = any(low <= code <= high for low, high in ranges)
                return frozenset((at + 1,) if is_there else ())
            case Concat(parts):
                places = frozenset((at,))
                for part in parts:
                    places = self._after_each(part, places)
                return places
            case Alternation(parts):
                return frozenset().union(*(self.after(part, at) for part in parts))
            case Repeat(part, minimum, maximum):
                return self._repeated(part, at, minimum, maximum)
            case Rule(name):
                return self.after(self._rules[name], at)
            case Lookahead():
                return frozenset((at,))

    def _after_each(self, part: Expression, places: Places) -> Places:
        return frozenset().union(*(self.after(part, at) for at in places))

    def _repeated(self, part: Expression, at: int, minimum: int, maximum: int | None) -> Places:
        found: set[int] = set()
        places = frozenset((at,))
        for number in range(minimum + len(self._text) + 1):
            if number >= minimum:
                found |= places
            following = self._after_each(part, places)
            if number == maximum or following == places:
                # More of them lead nowhere else.
                return frozenset(found | (following if number < minimum else places))
            places = following
        return frozenset(found)


def spaced(texts: Texts) -> Expression:
    """Return the expression of texts with optional whitespace between them."""
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
