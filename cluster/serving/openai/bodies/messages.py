"""The messages and tools of a conversation in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from cluster.serving.json_body import (
    BodyPart,
    OpenPart,
    check_counts,
    described,
    missing_field,
    named_schema,
    read_arguments,
    read_part,
)
from cluster.serving.text.template_arguments import ChatMessage, MessageToolCall
from cluster.serving.tools.tool import MAX_ID_LENGTH, MAX_TOOLS, NAME_PATTERN, Tool
from cluster.serving.tools.tool_choice import ToolChoice, check_allowed, check_tools, read_each_tool
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Function",
    "Message",
    "MessageCall",
    "RefusalPart",
    "TextPart",
    "ToolObject",
    "functions_field",
    "read_choice",
    "read_choice_of",
    "read_function_choice",
    "read_functions",
    "read_messages",
    "read_prediction",
    "read_tools",
    "tools_field",
]

_MEDIA = frozenset(
    ("audio_url", "file", "image_url", "input_audio", "input_file", "input_image", "video_url")
)


class TextPart(OpenPart):
    """A part of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(OpenPart):
    """A refusal of the assistant, which is part of the message's text."""

    type: Literal["refusal"]
    refusal: str


class ThinkingPart(OpenPart):
    """The reasoning of the assistant; the chat template decides whether it is read."""

    type: Literal["thinking"]
    thinking: str
    closed: Literal[True] = True


_Part = TextPart | RefusalPart | ThinkingPart

CONTENT_PARTS: Mapping[str, type[_Part]] = {
    "text": TextPart,
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
    "thinking": ThinkingPart,
}


class MessageContent(NamedTuple):
    """The text of a message, and the reasoning in its parts, if there is any."""

    text: str
    reasoning: str | None = None


def read_content(given: object, where: str, *, role: str, is_needed: bool) -> MessageContent:
    """Return the content of a message. Raises InvalidRequestError."""
    if isinstance(given, str):
        return MessageContent(given)
    if given is None:
        if is_needed:
            raise invalid_field(where, "is required.")
        return MessageContent("")
    if not isinstance(given, list):
        raise _not_parts(where)
    texts: list[str] = []
    thoughts: list[str] = []
    for index, one in enumerate(given):
        text = _plain_text(one)
        if text is not None:
            texts.append(text)
            continue
        if not isinstance(one, dict):
            raise _not_parts(where)
        part = _read_part(one, f"{where}.{index}", role)
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            thoughts.append(part.thinking)
    return MessageContent("".join(texts), "".join(thoughts) if thoughts else None)


def read_prediction(given: object) -> str:
    """Return the text of a prediction, empty without one. Raises InvalidRequestError."""
    if given is None:
        return ""
    if not isinstance(given, dict):
        raise invalid_field("prediction", "must be an object.")
    if given.get("type", "content") != "content":
        raise invalid_field("prediction.type", f"must be 'content', not {quote(given['type'])}.")
    content = read_content(given.get("content"), "prediction.content", role="user", is_needed=True)
    return content.text


def _plain_text(part: object) -> str | None:
    """Return the text of a string or a text part; None if it is another part."""
    if type(part) is str:
        return part
    # As TextPart; its validation would take ten times as long for each of thousands.
    if type(part) is dict and part.get("type") == "text" and type(text := part.get("text")) is str:
        return text
    return None


def _read_part(given: dict[str, object], where: str, role: str) -> _Part:
    kind = given.get("type")
    if kind is None:
        raise missing_field(("type",), given, where, CONTENT_PARTS.values())
    if isinstance(kind, str) and kind in _MEDIA:
        raise invalid_field(
            where, f"is not supported: the model only reads text, not {kind} parts."
        )
    found = CONTENT_PARTS.get(kind) if isinstance(kind, str) else None
    if found is None:
        *names, last = (f"'{name}'" for name in CONTENT_PARTS)
        raise invalid_field(
            f"{where}.type", f"must be one of {', '.join(names)} or {last}, not {quote(kind)}."
        )
    if found is not TextPart and role != "assistant":
        raise invalid_field(where, f"of type {kind} requires role = assistant.")
    return read_part(found, given, where)


def _not_parts(where: str) -> InvalidRequestError:
    return invalid_field(where, "must be a string or a list of text parts.")


_ONLY_TEXT = "the model only reads text"

_CONTINUED = "use continue_final_message = true and add_generation_prompt = false"

_PLAIN_FIELDS = frozenset(("role", "content"))

_PART_SCHEMAS: list[JsonValue] = [
    named_schema(name) for name in dict.fromkeys(part.__name__ for part in CONTENT_PARTS.values())
]

_ROLES = {"developer": "system", "function": "tool"}
"""Roles that chat templates know by another name."""


class CalledFunction(OpenPart):
    """The function of a tool call, and its arguments."""

    name: str
    arguments: str = described(
        "A JSON object as a string; an empty string is an empty object.", "{}"
    )


class MessageCall(OpenPart):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(OpenPart):
    """One message of a conversation; the chat template may read further fields."""

    rejected: ClassVar[Mapping[str, str]] = {
        "audio": _ONLY_TEXT,
        "images": _ONLY_TEXT,
        "partial": _CONTINUED,
        "prefix": _CONTINUED,
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Any = described(  # Any: an error names the invalid part
        "A string or an array of strings and parts; optional with calls, reasoning or a refusal. "
        "Special tokens of the model are treated as ordinary text, in every text of a message or "
        "tool.",
        anyOf=[
            {"type": "string"},
            {"type": "array", "items": {"anyOf": [{"type": "string"}, *_PART_SCHEMAS]}},
        ],
    )
    tool_calls: Any = described(  # Any: as above
        "The tool calls of an assistant message.", type="array", items=named_schema("MessageCall")
    )
    function_call: Any = described(  # Any: as above
        "The older form of `tool_calls`: the call of an assistant message.",
        **named_schema("CalledFunction"),
    )
    tool_call_id: str | None = described("The id of the call that a tool message answers.")
    name: str | None = described(
        "The name of the author, or the tool of a tool message. A message with the role "
        "`function` requires it: it answers the last `function_call` of that name."
    )
    reasoning_content: str | None = described("The model's reasoning before an assistant message.")
    reasoning: str | None = described("The same as `reasoning_content`.")
    refusal: str | None = described(
        "A refusal of the assistant, which is the message's text; requires that `content` is null "
        "or empty."
    )


def read_messages(given: Sequence[Message]) -> tuple[ChatMessage, ...]:
    """Return the messages of a conversation. Raises InvalidRequestError."""
    calls = [_calls_of(message, index) for index, message in enumerate(given)]
    arguments = "".join(call.function.arguments for found in calls for call in found)
    check_counts(arguments.encode(), "The arguments of tool_calls")
    messages: list[ChatMessage] = []
    ids: dict[str | None, str] = {}
    for index, message in enumerate(given):
        if isinstance(message.content, str) and message.model_fields_set <= _PLAIN_FIELDS:
            # The fast path of most messages.
            messages.append(ChatMessage(_role_of(message), message.content))
        else:
            messages.append(_message_of(message, calls[index], f"messages.{index}", ids))
        if message.function_call is not None:
            ids[calls[index][0].function.name] = calls[index][0].id
    return tuple(messages)


def _calls_of(message: Message, index: int) -> tuple[MessageCall, ...]:
    if message.role == "function" and message.name is None:
        where = f"messages.{index}.name"
        raise invalid_field(where, "is required with role = function.")
    given = message.tool_calls
    has_calls = given is not None and given != []
    if message.function_call is not None:
        where = f"messages.{index}.function_call"
        _check_assistant(message, where)
        if has_calls:
            raise invalid_field(where, "cannot be combined with tool_calls.")
        called = read_part(CalledFunction, message.function_call, where)
        # Some templates require ids of nine letters and digits.
        return (MessageCall(id=f"call{index:05}", function=called),)
    if not has_calls:
        return ()
    where = f"messages.{index}.tool_calls"
    _check_assistant(message, where)
    if not isinstance(given, list):
        raise invalid_field(where, "must be a list.")
    return tuple(
        read_part(MessageCall, call, f"{where}.{number}") for number, call in enumerate(given)
    )


def _check_assistant(message: Message, where: str) -> None:
    if message.role != "assistant":
        raise invalid_field(where, "requires role = assistant.")


def _message_of(
    message: Message, calls: Sequence[MessageCall], where: str, ids: Mapping[str | None, str]
) -> ChatMessage:
    """Return a message; `ids` are the ids of the last calls of functions, by name."""
    _check_fields(message, where)
    reasoning = _reasoning_of(message, where)
    is_result = message.role == "function"
    content = read_content(
        message.refusal or message.content,
        f"{where}.content",
        role=message.role,
        # As in a turn that was cut off while the model reasoned.
        is_needed=not (calls or is_result or reasoning),
    )
    if content.reasoning is not None and reasoning not in (None, content.reasoning):
        raise invalid_field(
            f"{where}.reasoning", "and thinking parts must be equal if both are given."
        )
    read_calls: list[MessageToolCall] = []
    for number, call in enumerate(calls):
        is_older = message.function_call is not None
        place = "function_call" if is_older else f"tool_calls.{number}.function"
        read_calls.append(_call_of(call, f"{where}.{place}"))
    return ChatMessage(
        role=_role_of(message),
        content=content.text,
        tool_calls=tuple(read_calls),
        tool_call_id=ids.get(message.name) if is_result else message.tool_call_id or None,
        name=message.name or None,
        reasoning=reasoning if content.reasoning is None else content.reasoning,
        extra=message.model_extra or None,
    )


def _check_fields(message: Message, where: str) -> None:
    # Clients may send each field of a message, empty if it is not set.
    if message.tool_call_id:
        param = f"{where}.tool_call_id"
        if message.role != "tool":
            raise invalid_field(param, "requires role = tool.")
        _check_length(message.tool_call_id, param)
    if message.name is not None:
        _check_length(message.name, f"{where}.name")
    if message.refusal:
        param = f"{where}.refusal"
        _check_assistant(message, param)
        if message.content not in (None, "", []):
            raise invalid_field(param, "cannot be combined with content.")


def _check_length(given: str, param: str) -> None:
    if len(given) > MAX_ID_LENGTH:
        raise invalid_field(param, f"may have at most {MAX_ID_LENGTH} characters.")


def _reasoning_of(message: Message, where: str) -> str | None:
    given = {"reasoning_content": message.reasoning_content, "reasoning": message.reasoning}
    found = {name: text for name, text in given.items() if text}
    if not found:
        is_empty = message.role == "assistant" and "" in given.values()
        return "" if is_empty else None
    if message.role != "assistant":
        param = f"{where}.{next(iter(found))}"
        raise invalid_field(param, "requires role = assistant.")
    if len(set(found.values())) > 1:
        param = f"{where}.reasoning"
        raise invalid_field(param, "and reasoning_content must be equal if both are set.")
    return next(iter(found.values()))


def _role_of(message: Message) -> str:
    return _ROLES.get(message.role, message.role)


def _call_of(call: MessageCall, where: str) -> MessageToolCall:
    arguments = read_arguments(call.function.arguments, f"{where}.arguments")
    return MessageToolCall(id=call.id, name=call.function.name, arguments=arguments)


class Function(OpenPart):
    """A function as the model sees it; the chat template may read further fields."""

    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    description: str | None = None
    parameters: Any = described(  # Any: a JSON schema
        "The JSON Schema of its arguments.", type="object"
    )
    strict: bool | None = described("Whether calls that are not forced follow the schema, too.")


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
    return described(
        "The older form of `tools`: the response has at most one call, as `function_call`.",
        **schema,
    )


def tools_field() -> Any:  # Any: a pydantic field, read by read_tools, which keeps nulls in schemas
    """Return the field of a call's tools."""
    schema: dict[str, JsonValue] = {
        "type": "array",
        "items": named_schema("ToolObject"),
        "maxItems": MAX_TOOLS,
    }
    return described("Functions that the model may call.", **schema)


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
    raise invalid_field(
        "tool_choice", "must be none, auto, required, a named function or allowed_tools."
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
            raise invalid_field(param, f"names {name[:64]!r}, which is not in functions.")
        return ToolChoice(kind="named", name=name, is_parallel=False)
    if given == "none" or given == "auto":
        return ToolChoice(kind=given, is_parallel=False)
    raise invalid_field(param, "must be none, auto or a named function.")


def _tool_of(given: object, where: str) -> Tool:
    return _function_of(read_part(ToolObject, given, where).function, f"{where}.function")


def _function_of(given: object, where: str) -> Tool:
    function = read_part(Function, given, where)
    if function.parameters is not None and not isinstance(function.parameters, dict):
        param = f"{where}.parameters"
        raise invalid_field(param, "must be a JSON Schema object.")
    tool = Tool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        is_strict=bool(function.strict),
        extra=function.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.parameters")
    return tool
