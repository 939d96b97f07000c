"""The structure of a turn that must be a tool call, or a list of them, or may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.json_body import json_text
from cluster.serving.tools.channel_reader import ANSWER_HEADER, call_header
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES, MAX_TEXT_LENGTH
from cluster.structured.grammar.schema_keywords import ANNOTATIONS, KNOWN
from cluster.structured.grammar.turn import MessageForm, MessagesStructure, TurnStructure
from pagedray.errors import invalid_field
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.serving.tools.tool import Tool
    from cluster.structured.grammar.turn import CallForm

__all__ = [
    "call_structure",
    "checked_schemas",
    "list_structure",
    "message_structure",
    "schema_without_text",
    "turn_structure",
]

_PARAM = "tools"
_MAX_DEPTH = 100
_CALL = "any call"
"""A name that no tool has."""

_OF_SCHEMAS = frozenset(("$defs", "definitions", "patternProperties", "properties"))
"""Keywords with schemas by name."""
_OF_VALUES = frozenset(("const", "enum", "required"))
"""Keywords with values that have no schemas."""


def call_structure(tool: Tool) -> Structure:
    """Return the structure of a tool's arguments. Raises InvalidRequestError."""
    return _structure(schema_without_text(tool.schema()))


def list_structure(tools: Sequence[Tool], *, is_parallel: bool) -> Structure:
    """Return the structure of a list of calls, of one call unless they are parallel.

    Raises InvalidRequestError.
    """
    call, definitions = _call_schema(tools, "parameters")
    # The first call and later calls are a single part, which is compiled once.
    definitions[_CALL] = call
    items = {"$ref": f"#/$defs/{_CALL}"}
    schema: dict[str, object] = {"type": "array", "minItems": 1, "items": items}
    if not is_parallel:
        schema["maxItems"] = 1
    return _structure(schema | {"$defs": definitions})


def message_structure(tools: Sequence[Tool], answer: Structure | None) -> Structure:
    """Return the structure of a message in channels: a call of a tool, or the answer if any.

    Raises InvalidRequestError.
    """
    messages: list[MessageForm] = []
    headers: list[tuple[str, str]] = []
    for tool, _, text in checked_schemas(tools):
        # Names have no whitespace, so no name is the beginning of another name.
        opening = f"{tool.name} "
        messages.append(MessageForm(opening, "json_schema", text))
        headers.append((call_header(tool.name), opening))
    if answer is not None:
        messages.append(MessageForm(" ", answer.kind, answer.text))
        headers.append((ANSWER_HEADER, " "))
    if len(messages) == 1:
        (message,) = messages
        only = ((headers[0][0], ""),)
        return Structure(kind="json_schema", text=message.text, headers=only)
    given = msgspec.json.encode(MessagesStructure(tuple(messages))).decode()
    return Structure(kind="messages", text=given, headers=tuple(headers))


def turn_structure(
    tools: Sequence[Tool], form: CallForm, answer: Structure, *, is_parallel: bool
) -> Structure:
    """Return the structure of a turn that is calls in a form of their own, or an answer.

    Raises InvalidRequestError.
    """
    call, definitions = _call_schema(tools, form.arguments)
    turn = TurnStructure(
        form=form,
        call=_text_of(call | {"$defs": definitions}),
        is_parallel=is_parallel,
        answer_kind=answer.kind,
        answer_text=answer.text,
    )
    return Structure(kind="turn", text=msgspec.json.encode(turn).decode(), mark=form.mark)


def _call_schema(tools: Sequence[Tool], key: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return the schema of a call of any tool, and the definitions that it refers to.

    Its arguments have this key.
    """
    definitions: dict[str, object] = {}
    calls: list[dict[str, object]] = []
    for tool, schema, _ in checked_schemas(tools):
        parameters = _hoisted(tool.name, schema, definitions)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"enum": [tool.name]}, key: parameters},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return {"anyOf": calls}, definitions


def checked_schemas(tools: Sequence[Tool]) -> Iterator[tuple[Tool, Mapping[str, object], str]]:
    """Yield each tool with its schema, as an object and as JSON.

    Raises InvalidRequestError if the schemas are too long together.
    """
    num_characters = 0
    for tool in tools:
        schema = schema_without_text(tool.schema())
        text = _text_of(schema)
        num_characters += len(text)
        if num_characters > MAX_TEXT_LENGTH:
            raise invalid_field(
                _PARAM,
                f"may have at most {MAX_TEXT_LENGTH} characters of parameters together, without "
                "their descriptions, if tool_choice is required, a tool is strict or the answer "
                "has a structure.",
            )
        yield tool, schema, text


def _text_of(schema: Mapping[str, object]) -> str:
    return json_text(schema, _PARAM, most_bytes=MAX_TEXT_BYTES)


def _structure(schema: Mapping[str, object]) -> Structure:
    return Structure(kind="json_schema", text=_text_of(schema))


@dataclass(frozen=True, slots=True)
class _Hoisting:
    """Moves a tool's schema into another schema."""

    tool_name: str
    root: str
    """The reference to the schema there."""


def _hoisted(name: str, schema: Mapping[str, object], definitions: dict[str, object]) -> object:
    """Return a reference to the schema of the tool `name`, which is moved to `definitions`."""
    hoisting = _Hoisting(name, f"#/$defs/{name}")
    definitions[name] = _referring(schema, hoisting, _MAX_DEPTH)
    return {"$ref": hoisting.root}


def _referring(value: object, hoisting: _Hoisting, depth: int) -> object:
    if depth == 0:
        raise invalid_field(
            _PARAM,
            f"has parameters of {hoisting.tool_name!r} that are nested more than {_MAX_DEPTH} "
            "levels deep.",
        )
    if isinstance(value, list):
        return [_referring(one, hoisting, depth - 1) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _reference(one, hoisting)
        if name == "$ref" and isinstance(one, str)
        else _referring(one, hoisting, depth - 1)
        for name, one in value.items()
    }


def _reference(given: str, hoisting: _Hoisting) -> str:
    if (given + "/").startswith("#/"):
        return hoisting.root + given[1:]
    raise invalid_field(
        _PARAM,
        f"has the unsupported $ref {given[:64]!r} in the parameters of {hoisting.tool_name!r}; it "
        "must refer to a part of them, such as #/$defs/name.",
    )


def schema_without_text(schema: Mapping[str, object]) -> dict[str, object]:
    """Return a schema that allows the same values, without keywords that do not restrict them."""
    return {
        keyword: _bare_part(keyword, part)
        for keyword, part in schema.items()
        if keyword in _OF_SCHEMAS or keyword not in ANNOTATIONS
    }


def _bare_part(keyword: str, part: object) -> object:
    # Keywords that are not known may have definitions by names.
    if keyword in _OF_VALUES or keyword not in KNOWN:
        return part
    if keyword in _OF_SCHEMAS and isinstance(part, Mapping):
        return {name: _bare(schema) for name, schema in part.items()}
    if isinstance(part, list):
        return [_bare(schema) for schema in part]
    return _bare(part)


def _bare(schema: object) -> object:
    return schema_without_text(schema) if isinstance(schema, Mapping) else schema
