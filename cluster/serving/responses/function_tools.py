"""The tools of OpenAI's Responses API: functions, alone or in namespaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from cluster.serving.schema.body import OpenPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.serving.tools.tool import MAX_TOOLS, NAME_PATTERN, Tool
from pagedray.errors import InvalidRequestError

__all__ = ["FunctionName", "FunctionTool", "FunctionTools", "NamespaceTool", "model_name"]


class FunctionTool(OpenPart):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    description: str | None = None
    parameters: Any = Field(None, json_schema_extra={"type": "object"})  # Any: a JSON schema
    strict: bool | None = Field(
        None, description="Whether calls that are not forced follow the schema, too."
    )
    defer_loading: Literal[False] = False
    is_async: Literal[False] = Field(False, alias="async")
    allowed_callers: list[Literal["direct"]] | None = None


class NamespaceTool(OpenPart):
    """Functions that share a namespace; the model reads its name and a dot before theirs."""

    type: Literal["namespace"]
    name: str = Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,126}$"})
    description: str | None = Field(
        None, description="Ignored; the descriptions of the functions are used."
    )
    tools: Any = Field(  # Any: read separately, which keeps nulls in schemas
        json_schema_extra={
            "type": "array",
            "items": named_schema("FunctionTool"),
            "maxItems": MAX_TOOLS,
        },
    )


@dataclass(frozen=True, slots=True)
class FunctionName:
    """The name of a function as clients know it."""

    name: str
    namespace: str | None = None


class FunctionTools:
    """The functions of a call."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []
        """Named as the model knows them."""
        self.names: dict[str, FunctionName] = {}
        """The names of functions in namespaces, by those that the model knows."""

    def read(self, given: object, param: str = "tools") -> None:
        """Read the tools of a parameter. Raises InvalidRequestError."""
        if given is None:
            return
        if not isinstance(given, list):
            raise InvalidRequestError(f"{param} must be a list.", param=param)
        for index, one in enumerate(given):
            where = f"{param}.{index}"
            if isinstance(one, dict) and one.get("type") == "namespace":
                self._read_namespace(one, where)
            else:
                self.tools.append(_tool_of(one, where))

    def _read_namespace(self, given: dict[str, object], where: str) -> None:
        inside = given.get("tools")
        # Nulls in the schemas are values.
        read = read_part(NamespaceTool, {**given, "tools": []} if inside else given, where)
        if not isinstance(inside, list) or len(inside) > MAX_TOOLS:
            param = f"{where}.tools"
            raise InvalidRequestError(
                f"{param} must be a list of at most {MAX_TOOLS} functions.", param=param
            )
        for index, one in enumerate(inside):
            tool = _tool_of(one, f"{where}.tools.{index}", namespace=read.name)
            self.tools.append(tool)
            own = tool.name.removeprefix(f"{read.name}.")
            self.names[tool.name] = FunctionName(own, read.name)


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a function."""
    return f"{namespace}.{name}" if namespace else name


def _tool_of(given: object, where: str, *, namespace: str | None = None) -> Tool:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind != "function" and kind is not None:
        raise InvalidRequestError(
            f"{where}.type must be function{'' if namespace else ' or namespace'}: OpenAI's own "
            "tools are not available.",
            param=f"{where}.type",
        )
    schema = given.get("parameters") if isinstance(given, dict) else None
    # Nulls in the schema are values.
    kept = {**given, "parameters": {}} if isinstance(given, dict) and schema else given
    read = read_part(FunctionTool, kept, where)
    if schema is not None and not isinstance(schema, Mapping):
        param = f"{where}.parameters"
        raise InvalidRequestError(f"{param} must be a JSON Schema object.", param=param)
    name = model_name(read.name, namespace)
    tool = Tool(
        name=name,
        description=read.description,
        parameters=schema,
        is_strict=bool(read.strict),
        extra=read.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.parameters")
    return tool
