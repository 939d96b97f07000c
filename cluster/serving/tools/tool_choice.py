"""The tools of a request: their part of the prompt, the structure they force, and the reader."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.serving.tools.tool_calls import list_reader, named_reader, turn_reader
from pagedray.errors import InvalidRequestError
from pagedray.request import Structure

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnReader

__all__ = ["MAX_TOOLS", "MAX_TOOL_BYTES", "Tool", "ToolChoice", "ToolUse"]

MAX_TOOLS = 128
MAX_TOOL_BYTES = 2**16
"""Bytes of a tool's description and parameters as JSON."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_DEPTH = 100
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """The JSON schema of its arguments; None for no arguments."""

    def check_limits(self, param: str) -> None:
        """Raise InvalidRequestError for an invalid name or a tool that is too large."""
        if _NAME.fullmatch(self.name) is None:
            raise InvalidRequestError(
                f"{param}.name must be 1 to 64 letters, digits, underscores or dashes.",
                param=f"{param}.name",
            )
        size = len(_to_json(self.for_template(), param).encode())
        if size > MAX_TOOL_BYTES:
            raise InvalidRequestError(
                f"{param} may have at most {MAX_TOOL_BYTES} bytes of JSON, not {size}.", param=param
            )

    def for_template(self) -> dict[str, object]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, object] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = self.schema()
        return {"type": "function", "function": function}

    def schema(self) -> Mapping[str, object]:
        """Return the JSON schema of its arguments."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether and which tools may or must be called."""

    kind: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    """The tool, if the kind is `named`."""
    is_parallel: bool = True
    """Whether a turn may contain several calls."""


class ToolUse:
    """The tools of one request with its tool choice."""

    def __init__(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        *,
        tool_format: ToolCallFormat | None,
        param: str = "tools",
    ) -> None:
        """Raises InvalidRequestError that names `param` or a field of it."""
        _check_tools(tools, param)
        self._tools = tuple(tools) if choice.kind != "none" else ()
        self._choice = choice
        self._tool_format = tool_format
        self._names = tuple(tool.name for tool in self._tools)
        self.structure: Structure | None = None
        """The structure that the choice forces; None if it forces none."""
        if choice.kind == "named":
            self._check_named()
            self.structure = _structure(self._schema_of(choice.name), param)
        elif choice.kind == "required":
            self._check_any(param)
            self.structure = _structure(self._schema_of_list(param), param)
        elif self._tools and tool_format is None:
            raise InvalidRequestError(
                "The model's chat template has no known format of tool calls; name the function in "
                "tool_choice, or start the server with --tool-call-format.",
                param=param,
            )

    @property
    def for_template(self) -> tuple[Mapping[str, object], ...]:
        """The tools in the form that chat templates expect."""
        return tuple(tool.for_template() for tool in self._tools)

    @property
    def is_forced(self) -> bool:
        """Whether the turn must consist of tool calls."""
        return self.structure is not None

    @property
    def is_read(self) -> bool:
        """Whether the turn's text is parsed for tool calls."""
        return bool(self._tools)

    @property
    def ends_as_text(self) -> bool:
        """Whether a turn with calls has the finish reason `stop`, as OpenAI's for named tools."""
        return self._choice.kind == "named"

    def reader(self) -> TurnReader:
        """Return a reader of one turn."""
        assert self.is_read
        has_short_ids = self._tool_format == "mistral"
        is_parallel = self._choice.is_parallel
        if self._choice.kind == "named":
            return named_reader(self._choice.name, has_short_ids=has_short_ids)
        if self._choice.kind == "required":
            return list_reader(self._names, is_parallel=is_parallel, has_short_ids=has_short_ids)
        assert self._tool_format is not None
        return turn_reader(self._tool_format, self._names, is_parallel=is_parallel)

    def _check_named(self) -> None:
        if self._choice.name not in self._names:
            raise InvalidRequestError(
                f"tool_choice names {self._choice.name[:64]!r}, which is not in tools.",
                param="tool_choice",
            )

    def _check_any(self, param: str) -> None:
        if not self._tools:
            raise InvalidRequestError("tool_choice requires tools.", param=param)

    def _schema_of(self, name: str) -> Mapping[str, object]:
        return next(tool.schema() for tool in self._tools if tool.name == name)

    def _schema_of_list(self, param: str) -> Mapping[str, object]:
        definitions: dict[str, object] = {}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"enum": [tool.name]},
                    "parameters": _hoisted(
                        tool, definitions, f"{param}.{position}.function.parameters"
                    ),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for position, tool in enumerate(self._tools)
        ]
        schema: dict[str, object] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self._choice.is_parallel:
            schema["maxItems"] = 1
        if definitions:
            schema["$defs"] = definitions
        return schema


def _check_tools(tools: Sequence[Tool], param: str) -> None:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"{param} may have at most {MAX_TOOLS} entries, not {len(tools)}.", param=param
        )
    for position, tool in enumerate(tools):
        tool.check_limits(f"{param}.{position}.function")
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError(f"{param} must have unique names.", param=param)


def _structure(schema: Mapping[str, object], param: str) -> Structure:
    return Structure(kind="json_schema", text=_to_json(schema, param))


def _to_json(value: object, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise InvalidRequestError(
            f"{param} contains a number that JSON cannot represent.", param=param
        ) from error


def _hoisted(tool: Tool, definitions: dict[str, object], param: str) -> object:
    """Return a tool's schema for use in another, with its definitions moved to `definitions`."""
    prefixes = {
        f"#/{keyword}/": f"#/$defs/{tool.name}.{keyword.strip('$')}." for keyword in _DEFINITIONS
    }
    schema = dict(tool.schema())
    for keyword in _DEFINITIONS:
        found = schema.pop(keyword, {})
        if not isinstance(found, Mapping):
            raise InvalidRequestError(f"{param}.{keyword} must be an object.", param=param)
        for name, definition in found.items():
            definitions[f"{tool.name}.{keyword.strip('$')}.{name}"] = _referring(
                definition, prefixes, param, _MAX_DEPTH
            )
    return _referring(schema, prefixes, param, _MAX_DEPTH)


def _referring(value: object, prefixes: Mapping[str, str], param: str, depth: int) -> object:
    if depth == 0:
        raise InvalidRequestError(
            f"{param} may be nested at most {_MAX_DEPTH} levels deep.", param=param
        )
    if isinstance(value, list):
        return [_referring(one, prefixes, param, depth - 1) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: _reference(one, prefixes, param)
        if name == "$ref" and isinstance(one, str)
        else _referring(one, prefixes, param, depth - 1)
        for name, one in value.items()
    }


def _reference(given: str, prefixes: Mapping[str, str], param: str) -> str:
    for old, new in prefixes.items():
        if given.startswith(old):
            return new + given[len(old) :]
    raise InvalidRequestError(
        f"{param} has the unsupported $ref {given[:64]!r}; it must begin with #/$defs/.",
        param=param,
    )
