"""The parameters of structured output, as OpenAI and vLLM name them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.serving.json_bodies.json_text import json_text
from cluster.serving.schema.body import BodyPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure, StructureKind

__all__ = [
    "JsonSchemaFormat",
    "RequestedStructure",
    "ResponseFormat",
    "StructuredOutputs",
    "read_response_format",
]


_TAG_FIELDS = ("structures", "triggers", "format")


class StructuredOutputs(BodyPart):
    """The structure of the output; exactly one of these."""

    json_: Any = Field(  # Any: a JSON Schema, as an object or a string
        None,
        alias="json",
        description="A JSON Schema, as an object or a string.",
        json_schema_extra={"type": ["object", "string"]},
    )
    regex: str | None = Field(None, description="A regular expression.")
    choice: Any = Field(  # Any: checked when it is compiled
        None,
        description="The strings to choose from.",
        json_schema_extra={"type": "array", "items": {"type": "string"}},
    )
    grammar: str | None = Field(None, description="A grammar in EBNF.")
    json_object: bool | None = Field(None, description="True allows any JSON object.")
    structural_tag: Any = Field(  # Any: as the schema
        None,
        description="A structural tag, as an object or a string of JSON.",
        json_schema_extra={"type": ["object", "string"]},
    )


class JsonSchemaFormat(BodyPart):
    """A JSON Schema and its name."""

    name: str
    description: str | None = None
    schema_: Any = Field(  # Any: a JSON Schema
        alias="schema", json_schema_extra={"type": ["object", "string"]}
    )
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: Any = Field(  # Any: read only if the type requires it
        None, json_schema_extra=named_schema("JsonSchemaFormat")
    )
    structures: Any = Field(  # Any: read with the structure, as the two that follow
        None,
        description="The parts of a structural tag, with `begin`, `schema` and `end`.",
        json_schema_extra={"type": "array", "items": {"type": "object"}},
    )
    triggers: Any = Field(
        None,
        description="The beginnings of the parts of a structural tag that end free text.",
        json_schema_extra={"type": "array", "items": {"type": "string"}},
    )
    format: Any = Field(
        None,
        description="A structural tag of nested parts.",
        json_schema_extra={"type": "object"},
    )


class RequestedStructure:
    """Collects the parameters that request a structure, of which at most one may be set."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.param: str | None = None
        """The parameter that requests it."""

    def add_structure(self, kind: StructureKind, text: str, param: str) -> None:
        """Request a structure. Raises InvalidRequestError for a second one."""
        if self.param is not None:
            raise InvalidRequestError(
                f"{param} and {self.param} cannot be used together.", param=param
            )
        self.structure = Structure(kind=kind, text=text)
        self.param = param

    def add_schema(self, given: object, param: str) -> None:
        """Request JSON of a schema, which is an object or a string. Raises InvalidRequestError."""
        text = _json_of(given, param, "a JSON Schema")
        self.add_structure("json_schema", text, param)

    def add_choices(self, given: object, param: str) -> None:
        """Request one of several strings."""
        self.add_structure("choice", _text_of(given, param), param)

    def add_tag(self, given: object, param: str) -> None:
        """Request a structural tag, which is an object or a string. Raises InvalidRequestError."""
        text = _json_of(given, param, "a structural tag")
        self.add_structure("structural_tag", text, param)

    def add_outputs(self, given: StructuredOutputs, param: str) -> None:
        """Request what vLLM's `structured_outputs` describes. Raises InvalidRequestError."""
        if given.json_ is not None:
            self.add_schema(given.json_, f"{param}.json")
        if given.regex is not None:
            self.add_structure("regex", given.regex, f"{param}.regex")
        if given.choice is not None:
            self.add_choices(given.choice, f"{param}.choice")
        if given.grammar is not None:
            self.add_structure("grammar", given.grammar, f"{param}.grammar")
        if given.json_object:
            self.add_structure("json_object", "", f"{param}.json_object")
        if given.structural_tag is not None:
            self.add_tag(given.structural_tag, f"{param}.structural_tag")
        if self.param is None:
            raise InvalidRequestError(
                f"{param} requires one of json, regex, choice, grammar, json_object and "
                "structural_tag.",
                param=param,
            )


def read_response_format(given: object, requested: RequestedStructure) -> None:
    """Request what OpenAI's `response_format` describes. Raises InvalidRequestError."""
    param = "response_format"
    if isinstance(given, dict) and given.get("type") == "structural_tag":
        # Nulls in its schemas are values.
        kept = {name: one for name, one in given.items() if name not in _TAG_FIELDS}
        read_part(ResponseFormat, kept, param)
        requested.add_tag(given, param)
        return
    read = read_part(ResponseFormat, given, param)
    for name in _TAG_FIELDS:
        if getattr(read, name) is not None:
            raise InvalidRequestError(
                f"{param}.{name} requires type = structural_tag.", param=f"{param}.{name}"
            )
    if read.type == "json_schema":
        schema = read_part(JsonSchemaFormat, read.json_schema or {}, f"{param}.json_schema")
        requested.add_schema(schema.schema_, f"{param}.json_schema.schema")
        return
    if read.json_schema is not None:
        raise InvalidRequestError(
            f"{param}.json_schema requires type = json_schema.", param=f"{param}.json_schema"
        )
    if read.type == "json_object":
        requested.add_structure("json_object", "", param)


def _json_of(given: object, param: str, what: str) -> str:
    """Return JSON that is given as an object or a string. Raises InvalidRequestError."""
    if not isinstance(given, str | dict):
        raise InvalidRequestError(f"{param} must be {what}.", param=param)
    return given if isinstance(given, str) else _text_of(given, param)


def _text_of(given: object, param: str) -> str:
    return json_text(given, param, most_bytes=MAX_TEXT_BYTES)
