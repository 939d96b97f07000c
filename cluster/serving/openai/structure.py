"""What a continuation must look like, in the words of OpenAI's and vLLM's clients."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from cluster.serving.http.schema import BodyPart, named_schema, read_part
from pagedray.errors import InvalidRequestError
from pagedray.request import Structure, StructureKind

__all__ = [
    "JsonSchemaFormat",
    "RequestedStructure",
    "ResponseFormat",
    "StructuredOutputs",
    "read_response_format",
]


class StructuredOutputs(BodyPart):
    """What a continuation must look like; exactly one of these."""

    json_: Any = Field(  # Any: a JSON schema, or one as text
        None,
        alias="json",
        description="A JSON schema, as an object or as text.",
        json_schema_extra={"type": ["object", "string"]},
    )
    regex: str | None = Field(None, description="A regular expression.")
    choice: Any = Field(  # Any: checked when it is compiled
        None,
        description="Texts of which it is one.",
        json_schema_extra={"type": "array", "items": {"type": "string"}},
    )
    grammar: str | None = Field(None, description="A grammar in EBNF.")
    json_object: bool | None = Field(None, description="True for any JSON object.")


class JsonSchemaFormat(BodyPart):
    """A JSON schema and its name."""

    name: str
    description: str | None = None
    schema_: Any = Field(  # Any: a JSON schema
        alias="schema", json_schema_extra={"type": ["object", "string"]}
    )
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """What a continuation must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Any = Field(  # Any: read once the type asks for it
        None, json_schema_extra=named_schema("JsonSchemaFormat")
    )


class RequestedStructure:
    """Collects the parameters that ask for a structure, of which there may be one."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.param: str | None = None
        """The parameter that it stands in."""

    def add(self, kind: StructureKind, text: str, param: str) -> None:
        """Ask for a structure. Raises InvalidRequestError for a second one."""
        if self.param is not None:
            raise InvalidRequestError(
                f"{param} and {self.param} contradict each other.", param=param
            )
        self.structure = Structure(kind=kind, text=text)
        self.param = param

    def add_schema(self, given: object, param: str) -> None:
        """Ask for JSON of a schema, an object or its text."""
        if not isinstance(given, str | dict):
            raise InvalidRequestError(f"{param} must be a JSON schema.", param=param)
        self.add("json_schema", given if isinstance(given, str) else _to_json(given, param), param)

    def add_choices(self, given: object, param: str) -> None:
        """Ask for one of some texts."""
        self.add("choice", _to_json(given, param), param)

    def add_outputs(self, given: StructuredOutputs, param: str) -> None:
        """Ask for what one of vLLM's structured outputs says."""
        if given.json_ is not None:
            self.add_schema(given.json_, f"{param}.json")
        if given.regex is not None:
            self.add("regex", given.regex, f"{param}.regex")
        if given.choice is not None:
            self.add_choices(given.choice, f"{param}.choice")
        if given.grammar is not None:
            self.add("grammar", given.grammar, f"{param}.grammar")
        if given.json_object:
            self.add("json_object", "", f"{param}.json_object")
        if self.param is None:
            raise InvalidRequestError(
                f"{param} needs one of json, regex, choice, grammar and json_object.", param=param
            )


def read_response_format(given: object, requested: RequestedStructure) -> None:
    """Ask for what OpenAI's `response_format` says."""
    param = "response_format"
    read = read_part(ResponseFormat, given, param)
    if read.type == "json_schema":
        schema = read_part(JsonSchemaFormat, read.json_schema or {}, f"{param}.json_schema")
        requested.add_schema(schema.schema_, f"{param}.json_schema.schema")
        return
    if read.json_schema is not None:
        raise InvalidRequestError(
            f"{param}.json_schema needs type = json_schema.", param=f"{param}.json_schema"
        )
    if read.type == "json_object":
        requested.add("json_object", "", param)


def _to_json(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{param} holds a number that is too large for JSON.", param=param
        ) from error
