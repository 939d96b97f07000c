"""A turn in which the model may write text, and calls of tools that follow their schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from cluster.structured.grammar.calls.element_arguments import ARG_KEYS, PARAMETERS
from cluster.structured.grammar.calls.other_text import other_text
from cluster.structured.grammar.calls.python_arguments import PYTHON_RULES, read_python_arguments
from cluster.structured.grammar.calls.texts import Texts, spaced
from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Repeat,
    Rule,
    Text,
    invalid_structure,
    optional,
)
from cluster.structured.grammar.json_text import JSON_RULES
from cluster.structured.grammar.schemas.json_schema import read_json_schema
from cluster.structured.grammar.text_until import text_until
from cluster.structured.grammar.turn import Grammar, under_prefix
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "CallText",
    "CallsStructure",
    "LeadingCallsStructure",
    "Notation",
    "read_calls",
    "read_leading_calls",
]

Notation = Literal["json", "python", "parameters", "arg_keys"]
"""How arguments are written."""
_READERS: Mapping[Notation, Callable[[str], Grammar]] = {
    "json": read_json_schema,
    "python": read_python_arguments,
    "parameters": PARAMETERS.read_arguments,
    "arg_keys": ARG_KEYS.read_arguments,
}
_RULES: Mapping[Notation, dict[str, Expression]] = {
    "json": JSON_RULES,
    "python": PYTHON_RULES,
    "parameters": PARAMETERS.rules(),
    "arg_keys": ARG_KEYS.rules(),
}
"""What the arguments of all calls share."""


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
    notation: Notation = "json"


class LeadingCallsStructure(CallsStructure, frozen=True, kw_only=True):
    """The text of a structure of this kind, as JSON; the mark is optional in it."""

    beginnings: tuple[Texts, ...]
    """What a turn cannot begin with unless it consists of calls."""


_Given = TypeVar("_Given", bound=CallsStructure)


def read_calls(text: str) -> Grammar:
    """Return the grammar: any text, which calls may follow from the first mark on.

    Raises InvalidRequestError.
    """
    given = _decoded(text, CallsStructure)
    rules, calls = _read_calls(given)
    text_rules, start = text_until({given.mark: calls}, "text", may_end=True)
    return rules | text_rules, start


def read_leading_calls(text: str) -> Grammar:
    """Return the grammar: calls, or any text that does not begin as they do.

    Raises InvalidRequestError.
    """
    given = _decoded(text, LeadingCallsStructure)
    rules, calls = _read_calls(given)
    text_rules, other = other_text(given.beginnings)
    before = Concat((_WHITESPACE, optional(Text(given.mark)), _WHITESPACE))
    return rules | text_rules, Alternation((Concat((before, calls)), other))


_WHITESPACE = Repeat(Characters(((0x09, 0x0A), (0x20, 0x20))), 0, None)


def _read_calls(given: CallsStructure) -> tuple[dict[str, Expression], Rule]:
    """Return rules, and the rule of everything from the mark on."""
    shared = _RULES[given.notation]
    rules = dict(shared)
    choices: list[Expression] = []
    for number, call in enumerate(given.calls):
        arguments = _arguments(call, given.notation)
        own_rules, start = under_prefix(arguments, f"call{number}part", shared=shared)
        choice = Rule(f"call{number}")
        rules |= own_rules
        rules[choice.name] = Concat((spaced(call.begin), start, spaced(call.end)))
        choices.append(choice)
    one = Alternation(tuple(choices))
    more = Repeat(Concat((spaced(given.separator), one)), 0, None)
    calls = Rule("calls")
    rules[calls.name] = Concat(
        (
            spaced(given.opening),
            one,
            *((more,) if given.is_parallel else ()),
            spaced(given.closing),
        )
    )
    return rules, calls


def _decoded(text: str, kind: type[_Given]) -> _Given:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is not a valid list of calls: {error}.") from error


def _arguments(call: CallText, notation: Notation) -> Grammar:
    try:
        return _READERS[notation](call.schema)
    except InvalidRequestError as error:
        # It begins with the name of the parameter.
        what = str(error).removeprefix("structure ")
        raise invalid_structure(
            f"structure has the strict tool {call.tool!r}, which {what}"
        ) from error
