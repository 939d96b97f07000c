"""The tools of a conversation in OpenAI's format, and the functions that came before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue

from cluster.serving.schema.body import BodyPart, OpenPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.serving.tools.tool import MAX_TOOLS, NAME_PATTERN, Tool
from cluster.serving.tools.tool_choice import ToolChoice, check_allowed, check_tools, read_each_tool
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = [
    "AllowedTools",
    "AllowedToolsChoice",
    "Function",
    "NamedFunction",
    "ToolChoiceObject",
    "ToolObject",
    "functions_field",
    "read_choice",
    "read_choice_of",
    "read_function_choice",
    "read_functions",
    "read_tools",
    "tools_field",
]


class Function(OpenPart):
    """A function as the model sees it; the chat template may read further fields."""

    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    description: str | None = None
    parameters: Any = Field(  # Any: a JSON schema
        None,
        description="The JSON Schema of its arguments.",
        json_schema_extra={"type": "object"},
    )
    strict: bool | None = Field(
        None, description="Whether calls that are not forced follow the schema, too."
    )


class ToolObject(OpenPart):
    """A function that the model may call."""

    type: Literal["function"]
    function: Any = Field(  # Any: read separately, which ignores nulls in it
        json_schema_extra=named_schema("Function")
    )


class NamedFunction(BodyPart):
    """The name of a function."""

    name: str


class ToolChoiceObject(BodyPart):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BodyPart):
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Any = Field(  # Any: read separately, which keeps nulls in schemas
        json_schema_extra={
            "type": "array",
            "items": named_schema("ToolObject"),
            "minItems": 1,
            "maxItems": MAX_TOOLS,
        }
    )


class AllowedToolsChoice(BodyPart):
    """Restricts a call to some of its tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Any = Field(  # Any: read separately
        json_schema_extra=named_schema("AllowedTools")
    )


def functions_field() -> Any:  # Any: as in tools_field
    """Return the field of a call's functions, which OpenAI replaced by tools."""
    schema: dict[str, JsonValue] = {
        "type": "array",
        "items": named_schema("Function"),
        "maxItems": MAX_TOOLS,
    }
    return Field(
        None,
        description="The older form of `tools`: the response has at most one call, as "
        "`function_call`.",
        json_schema_extra=schema,
    )


def tools_field() -> Any:  # Any: a pydantic field, read by read_tools, which keeps nulls in schemas
    """Return the field of a call's tools."""
    schema: dict[str, JsonValue] = {
        "type": "array",
        "items": named_schema("ToolObject"),
        "maxItems": MAX_TOOLS,
    }
    return Field(None, description="Functions that the model may call.", json_schema_extra=schema)


def read_tools(given: object) -> tuple[Tool, ...]:
    """Return the tools of a call, none for None. Raises InvalidRequestError."""
    tools = tuple(read_each_tool(given, "tools", _tool_of))
    check_tools(tools)
    return tools


def read_functions(given: object) -> tuple[Tool, ...]:
    """Return the functions of a call, none for None. Raises InvalidRequestError."""
    return tuple(read_each_tool(given, "functions", _function_of))


def read_choice(given: object, *, is_parallel: bool, has_tools: bool) -> ToolChoice:
    """Return the tool choice that `tool_choice` describes. Raises InvalidRequestError."""
    return read_choice_of(
        given,
        is_parallel=is_parallel,
        has_tools=has_tools,
        read_name=lambda named: read_part(ToolChoiceObject, named, "tool_choice").function.name,
        read_allowed=_allowed_choice,
    )


def read_choice_of(
    given: object,
    *,
    is_parallel: bool,
    has_tools: bool,
    read_name: Callable[[object], str],
    read_allowed: Callable[[dict[str, object], bool], ToolChoice],
) -> ToolChoice:
    """Return a tool choice, of which an API writes a function or several in a form of its own.

    Raises InvalidRequestError.
    """
    if given is None:
        given = "auto" if has_tools else "none"
    if isinstance(given, dict):
        if given.get("type") == "allowed_tools":
            return read_allowed(given, is_parallel)
        return ToolChoice(kind="named", name=read_name(given), is_parallel=is_parallel)
    if given == "none" or given == "auto" or given == "required":
        return ToolChoice(kind=given, is_parallel=is_parallel)
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, a named function or allowed_tools.",
        param="tool_choice",
    )


def _allowed_choice(given: dict[str, object], is_parallel: bool) -> ToolChoice:
    """Return the choice among some of the tools. Raises InvalidRequestError."""
    param = "tool_choice.allowed_tools"
    inside = read_part(AllowedToolsChoice, given, "tool_choice").allowed_tools
    read = read_part(AllowedTools, inside, param)
    check_allowed(read.tools, f"{param}.tools")
    allowed = read_each_tool(read.tools, f"{param}.tools", _tool_of)
    return ToolChoice(kind=read.mode, is_parallel=is_parallel, allowed=tuple(allowed))


def read_function_choice(given: object, functions: Sequence[Tool]) -> ToolChoice:
    """Return the choice of at most one call that `function_call` describes.

    Raises InvalidRequestError.
    """
    param = "function_call"
    if given is None:
        given = "auto"
    if isinstance(given, dict):
        name = read_part(NamedFunction, given, param).name
        if all(name != function.name for function in functions):
            raise InvalidRequestError(
                f"{param} names {name[:64]!r}, which is not in functions.", param=param
            )
        return ToolChoice(kind="named", name=name, is_parallel=False)
    if given == "none" or given == "auto":
        return ToolChoice(kind=given, is_parallel=False)
    raise InvalidRequestError(f"{param} must be none, auto or a named function.", param=param)


def _tool_of(given: object, where: str) -> Tool:
    return _function_of(read_part(ToolObject, given, where).function, f"{where}.function")


def _function_of(given: object, where: str) -> Tool:
    function = read_part(Function, given, where)
    if function.parameters is not None and not isinstance(function.parameters, dict):
        param = f"{where}.parameters"
        raise InvalidRequestError(f"{param} must be a JSON Schema object.", param=param)
    tool = Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        is_strict=bool(function.strict),
        extra=function.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.parameters")
    return tool
