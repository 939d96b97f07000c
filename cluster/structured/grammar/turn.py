"""A turn that is either tool calls or an answer of another structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.structured.grammar.beginnings import may_begin_with
from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    invalid_structure,
)
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.json_text import JSON_RULES

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CallForm",
    "Grammar",
    "MessageForm",
    "MessagesStructure",
    "TurnStructure",
    "read_messages",
    "read_turn",
    "under_prefix",
]

_ANSWER = "answer"
Grammar = tuple[dict[str, Expression], Expression]
"""The rules of a grammar, and where it starts."""


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """What a model writes around calls that are JSON objects, as it was trained to."""

    mark: str
    """How calls begin; it may be a special token."""
    opening: str = ""
    """What follows the mark."""
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
    """What stands for its header, different for each."""
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


def under_prefix(grammar: Grammar, prefix: str) -> Grammar:
    """Return a grammar whose rules, other than those of JSON itself, have names of their own."""
    rules, start = grammar
    renamed = {_prefixed(name, prefix): _renamed(one, prefix) for name, one in rules.items()}
    return renamed, _renamed(start, prefix)


def _prefixed(name: str, prefix: str) -> str:
    """Return the name of a rule of one part; all parts share the rules of JSON itself."""
    return name if name in JSON_RULES else f"{prefix}{name}"


def _renamed(expression: Expression, prefix: str) -> Expression:
    match expression:
        case Rule(name):
            return Rule(_prefixed(name, prefix))
        case Concat(parts):
            return Concat(tuple(_renamed(part, prefix) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(_renamed(part, prefix) for part in parts))
        case Repeat(part, minimum, maximum):
            return Repeat(_renamed(part, prefix), minimum, maximum)
        case Lookahead(part):
            return Lookahead(_renamed(part, prefix))
    return expression
