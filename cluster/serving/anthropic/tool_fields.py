"""The tools of a conversation in Anthropic's format, and the choice among them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.serving.schema.body import BodyPart, OpenPart
from cluster.serving.schema.body_reader import read_part
from cluster.serving.tools.tool import NAME_PATTERN, Tool
from cluster.serving.tools.tool_choice import ToolChoice
from pagedray.errors import InvalidRequestError

__all__ = [
    "NO_TOOLS_OF_ANTHROPIC",
    "AnthropicTool",
    "AnthropicToolChoice",
    "read_anthropic_choice",
    "read_anthropic_tool",
]

NO_TOOLS_OF_ANTHROPIC = "tools run by Anthropic are not available"


class AnthropicTool(OpenPart):
    """A function that the model may call."""

    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: Any = Field(json_schema_extra={"type": "object"})  # Any: a JSON schema
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] | None = None
    strict: bool | None = Field(
        None, description="Whether calls that are not forced follow the schema, too."
    )


class AnthropicToolChoice(BodyPart):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def read_anthropic_tool(given: object, where: str) -> Tool:
    """Return the tool of a request, `where` in it. Raises InvalidRequestError."""
    if isinstance(given, dict) and given.get("type") not in (None, "custom"):
        raise InvalidRequestError(
            f"{where}.type must be custom: {NO_TOOLS_OF_ANTHROPIC}.", param=f"{where}.type"
        )
    schema = given.get("input_schema") if isinstance(given, dict) else None
    # Nulls in the schema are values.
    kept = {**given, "input_schema": {}} if isinstance(given, dict) and schema else given
    read = read_part(AnthropicTool, kept, where)
    if not isinstance(schema, dict):
        param = f"{where}.input_schema"
        raise InvalidRequestError(f"{param} must be a JSON Schema object.", param=param)
    tool = Tool(
        name=read.name,
        description=read.description,
        parameters=schema,
        is_strict=bool(read.strict),
        extra=read.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.input_schema")
    return tool


def read_anthropic_choice(given: AnthropicToolChoice | None, *, has_tools: bool) -> ToolChoice:
    """Return which tools must be called. Raises InvalidRequestError."""
    if given is None:
        return ToolChoice(kind="auto" if has_tools else "none")
    is_parallel = not given.disable_parallel_tool_use
    if given.type == "tool":
        if given.name is None:
            raise InvalidRequestError("tool_choice.name is required.", param="tool_choice.name")
        return ToolChoice(kind="named", name=given.name, is_parallel=is_parallel)
    if given.type == "any":
        return ToolChoice(kind="required", is_parallel=is_parallel)
    return ToolChoice(kind=given.type, is_parallel=is_parallel)
