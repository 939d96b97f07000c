"""A turn in which the model may write text, and calls of tools that follow their schemas."""

from __future__ import annotations

import msgspec

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    invalid_structure,
)
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.json_text import JSON_RULES, SPACE
from cluster.structured.grammar.text_until import text_until
from cluster.structured.grammar.turn import Grammar, under_prefix
from pagedray.errors import InvalidRequestError

__all__ = ["CallText", "CallsStructure", "Texts", "read_calls"]

Texts = tuple[str, ...]
"""Literal texts with optional blanks between them."""


class CallText(msgspec.Struct, frozen=True, array_like=True):
    """A call of one tool."""

    tool: str
    begin: Texts
    schema: str
    """The JSON schema of its arguments."""
    end: Texts


class CallsStructure(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a structure of this kind, as JSON."""

    mark: str
    """How calls begin; it may be a special token."""
    opening: Texts
    """What follows the mark."""
    calls: tuple[CallText, ...]
    separator: Texts
    closing: Texts
    """What ends the turn, after its calls."""
    is_parallel: bool
    """Whether there may be several calls."""


def read_calls(text: str) -> Grammar:
    """Return the grammar: any text, which calls may follow from the first mark on.

    Raises InvalidRequestError.
    """
    try:
        given = msgspec.json.decode(text, type=CallsStructure)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is not a valid list of calls: {error}.") from error
    rules = dict(JSON_RULES)
    choices: list[Expression] = []
    for number, call in enumerate(given.calls):
        own_rules, arguments = under_prefix(_arguments(call), f"call{number}part")
        choice = Rule(f"call{number}")
        rules |= own_rules
        rules[choice.name] = Concat((_spaced(call.begin), arguments, _spaced(call.end)))
        choices.append(choice)
    one = Alternation(tuple(choices))
    more = Repeat(Concat((_spaced(given.separator), one)), 0, None)
    rules["calls"] = Concat(
        (
            _spaced(given.opening),
            one,
            *((more,) if given.is_parallel else ()),
            _spaced(given.closing),
        )
    )
    text_rules, start = text_until({given.mark: Rule("calls")}, "text", may_end=True)
    return rules | text_rules, start


def _arguments(call: CallText) -> Grammar:
    try:
        return read_json_schema(call.schema)
    except InvalidRequestError as error:
        # It begins with the name of the parameter.
        what = str(error).removeprefix("structure ")
        raise invalid_structure(
            f"structure has the strict tool {call.tool!r}, which {what}"
        ) from error


def _spaced(texts: Texts) -> Expression:
    parts: list[Expression] = []
    for text in texts:
        parts += (SPACE, Text(text)) if text else (SPACE,)
    return Concat(tuple(parts[1:]))
