"""The parameters that all of OpenAI's endpoints which generate text have in common."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, JsonValue

from cluster.serving.json_body import json_text
from cluster.serving.openai.bodies.parameters import bounds, cache_salt_field
from cluster.serving.schema.body import Body, BodyPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_LOGIT_BIAS, MAX_STOP, MAX_STOP_LENGTH
from pagedray.structure import Structure, StructureKind
from pagedray.text import quote, quote_json

__all__ = [
    "JsonSchemaFormat",
    "RequestedStructure",
    "ResponseFormat",
    "SamplingFields",
    "StructuredOutputs",
    "read_response_format",
]

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")
_LAST_OF_LATIN_1 = "\u00ff"
_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
)
_ONE_STOP: dict[str, JsonValue] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}

_TAG_FIELDS = ("structures", "triggers", "format")


class SamplingFields(Body):
    """Parameters by OpenAI's and vLLM's names."""

    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    min_p: float | None = bounds(
        "Minimum probability of a token, relative to that of the most likely token.", 0, 1
    )
    repetition_penalty: float | None = bounds(
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        0.01,
        100,
    )
    presence_penalty: float | None = bounds(
        "Subtracted from the logits of tokens in the output.", -2, 2
    )
    frequency_penalty: float | None = bounds(
        "Subtracted from a token's logit once for each of its occurrences in the output.", -2, 2
    )
    seed: int | None = bounds(
        "Random seed, which makes sampling reproducible, except for rounding; -1 is random.",
        -(2**63),
        2**63 - 1,
    )
    ignore_eos: bool | None = Field(
        None, description="Whether to generate past the model's end-of-sequence tokens."
    )
    # The validator checks its length before its entries.
    stop: Any = Field(
        None,
        description="Strings that end the output.",
        json_schema_extra={
            "anyOf": [_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOP}]
        },
    )
    logit_bias: Any = Field(
        None,
        description="Token ids and the biases added to their logits.",
        json_schema_extra={
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
    )
    skip_special_tokens: bool = Field(
        True, description="Whether special tokens are left out of the text."
    )
    include_stop_str_in_output: bool = Field(
        False, description="Whether the text includes the stop string or token that ended it."
    )
    # Read when used, so that an error names the innermost field.
    structured_outputs: Any = Field(
        None,
        description="A constraint on the output: one of `json`, `regex`, `choice`, `grammar`, "
        "`json_object` and `structural_tag`.",
        json_schema_extra=named_schema("StructuredOutputs"),
    )
    request_id: str | None = Field(
        None,
        description="The same as the header X-Request-Id; if both are set, they must be equal.",
    )
    priority: int = Field(
        0,
        description="Requests with a lower value are served earlier, and may preempt running "
        "requests of the same tenant with a higher value.",
        json_schema_extra={"minimum": -(2**31), "maximum": 2**31 - 1},
    )
    cache_salt: str | None = cache_salt_field()

    def client_id(self, header: str | None) -> str | None:
        """Return the client's own id of the call. Raises InvalidRequestError."""
        if self.request_id is None:
            return header
        if any(character > _LAST_OF_LATIN_1 for character in self.request_id):
            raise InvalidRequestError(
                "request_id may only contain characters of Latin-1: responses have it in the "
                "header X-Request-Id.",
                param="request_id",
            )
        if header is None:
            return self.request_id
        if self.request_id != header:
            raise InvalidRequestError(
                "request_id and the header X-Request-Id must be equal if both are set.",
                param="request_id",
            )
        return header

    def add_structured_outputs(self, requested: RequestedStructure) -> None:
        """Request the structure of `structured_outputs`. Raises InvalidRequestError."""
        if self.structured_outputs is not None:
            outputs = read_part(StructuredOutputs, self.structured_outputs, "structured_outputs")
            requested.add_outputs(outputs, "structured_outputs")

    def common_sampling(self) -> dict[str, object]:
        """Return the fields of SamplingParams that the client set. Raises InvalidRequestError."""
        given: dict[str, object] = {
            name: value for name in _NAMES if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = _stop_of(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_of(self.logit_bias)
        return given


def _stop_of(given: object) -> object:
    if isinstance(given, str):
        return (given,) if given else ()
    return tuple(given) if isinstance(given, list) else given


def _bias_of(given: object) -> dict[object, object]:
    if given == []:
        # PHP's empty object.
        return {}
    if not isinstance(given, dict):
        raise InvalidRequestError(
            "logit_bias must be an object that maps token ids to numbers.", param="logit_bias"
        )
    wrong = next((name for name in given if not _INTEGER.fullmatch(name)), None)
    if wrong is not None:
        raise InvalidRequestError(
            f'logit_bias maps token ids, such as "5", and not {quote(wrong)}.',
            param="logit_bias",
        )
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidRequestError(
                f"logit_bias.{name} must be a number, not {quote_json(value)}.",
                param=f"logit_bias.{name}",
            )
    return {int(name): value for name, value in given.items()}


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
    """Collects the parameters that request a structure; at most one may be set."""

    def __init__(self) -> None:
        self.structure: Structure | None = None
        self.param: str | None = None
        """The parameter that requests it."""

    def add_structure(self, kind: StructureKind, text: str, param: str) -> None:
        """Request a structure. Raises InvalidRequestError for a second structure."""
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
        """Request the structure of vLLM's `structured_outputs`. Raises InvalidRequestError."""
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
    """Request the structure of OpenAI's `response_format`. Raises InvalidRequestError."""
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
