"""A turn that is either tool calls or an answer of another structure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

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

__all__ = ["CallForm", "TurnStructure", "read_turn"]

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


def read_turn(text: str, read_answer: Callable[[str, str], Grammar]) -> Grammar:
    """Return the grammar; `read_answer` returns that of a kind and a text.

    Raises InvalidRequestError.
    """
    try:
        turn = msgspec.json.decode(text, type=TurnStructure)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is no turn: {error}.") from error
    rules, call = read_json_schema(turn.call)
    answer_rules, answer = read_answer(turn.answer_kind, turn.answer_text)
    rules |= {_answer_name(name): _renamed(expression) for name, expression in answer_rules.items()}
    form = turn.form
    more = Repeat(Concat((Text(form.separator), call)), 0, None)
    calls = Concat(
        (
            Text(form.mark + form.opening),
            call,
            *((more,) if turn.is_parallel else ()),
            *((Text(form.closing),) if form.closing else ()),
        )
    )
    return rules, Alternation((calls, _renamed(answer)))


def _answer_name(name: str) -> str:
    """Return the name of a rule of the answer; those of JSON itself are shared with the calls."""
    return name if name in JSON_RULES else f"answer{name}"


def _renamed(expression: Expression) -> Expression:
    match expression:
        case Rule(name):
            return Rule(_answer_name(name))
        case Concat(parts):
            return Concat(tuple(map(_renamed, parts)))
        case Alternation(parts):
            return Alternation(tuple(map(_renamed, parts)))
        case Repeat(part, minimum, maximum):
            return Repeat(_renamed(part), minimum, maximum)
        case Lookahead(part):
            return Lookahead(_renamed(part))
    return expression
