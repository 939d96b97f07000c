"""The messages and tools of a conversation in OpenAI's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue
from pydantic_core import from_json

from cluster.serving.http.schema import BodyPart, named_schema, read_part
from cluster.serving.json_body import check_counts
from cluster.serving.text.chat_template import ChatMessage, MessageToolCall
from cluster.serving.tools.tool import MAX_TOOLS, Tool
from cluster.serving.tools.tool_choice import ToolChoice
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.intake.steps import Steps

__all__ = [
    "Function",
    "Message",
    "MessageCall",
    "TextPart",
    "ToolChoiceObject",
    "ToolObject",
    "read_choice",
    "read_messages",
    "read_tools",
    "tools_field",
]

_MAX_CALLS = 128
_MAX_ID_LENGTH = 128
_STEP_MESSAGES = 256
_PLAIN_FIELDS = frozenset(("role", "content"))
_MEDIA = frozenset(("audio_url", "file", "image_url", "input_audio", "video_url"))


class TextPart(BodyPart):
    """A part of a message's text."""

    type: Literal["text"]
    text: str
    cache_control: Any = Field(  # Any: a hint of Anthropic's clients
        None, description="Ignored; prefixes are cached anyway."
    )


class CalledFunction(BodyPart):
    """The function of a tool call, and its arguments."""

    name: str
    arguments: str = Field(
        "{}", description="A JSON object as a string; an empty string is an empty object."
    )


class MessageCall(BodyPart):
    """A tool call of an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Ignored; clients copy it from streams.")


class Message(BodyPart):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = Field(  # Any: an error names the invalid part
        None,
        description="A string or an array of text parts; optional with `tool_calls`. Special "
        "tokens of the model in it, as in every text of a message or tool, are ordinary text.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": named_schema("TextPart")},
            ]
        },
    )
    tool_calls: Any = Field(  # Any: as above
        None,
        description="The tool calls of an assistant message.",
        json_schema_extra={
            "type": "array",
            "items": named_schema("MessageCall"),
            "maxItems": _MAX_CALLS,
        },
    )
    tool_call_id: str | None = Field(
        None, description="The id of the call that a tool message answers."
    )
    name: str | None = Field(
        None, description="The name of the author, or the tool of a tool message."
    )
    reasoning_content: str | None = Field(
        None, description="What the model thought before an assistant message."
    )
    reasoning: str | None = Field(None, description="The same as `reasoning_content`.")
    refusal: Any = Field(None, json_schema_extra={"type": "null"})  # Any: only null
    annotations: Any = Field(  # Any: only an empty list
        None, json_schema_extra={"type": "array", "maxItems": 0}
    )


class Function(BodyPart):
    """A function as the model sees it."""

    name: str = Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,64}$"})
    description: str | None = None
    parameters: Any = Field(  # Any: a JSON schema
        None,
        description="The JSON Schema of its arguments.",
        json_schema_extra={"type": "object"},
    )
    strict: bool | None = None


class ToolObject(BodyPart):
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


def tools_field() -> Any:  # Any: a pydantic field, read by read_tools, which keeps nulls in schemas
    """Return the field of a call's tools."""
    schema: dict[str, JsonValue] = {
        "type": "array",
        "items": named_schema("ToolObject"),
        "maxItems": MAX_TOOLS,
    }
    return Field(None, json_schema_extra=schema)


def read_messages(given: Sequence[Message]) -> Steps[tuple[ChatMessage, ...]]:
    """Return the messages of a conversation. Raises InvalidRequestError."""
    calls: list[tuple[MessageCall, ...]] = []
    for index, message in enumerate(given):
        calls.append(_calls_of(message, index))
        if calls[-1] or index % _STEP_MESSAGES == 0:
            yield
    arguments = "".join(call.function.arguments for found in calls for call in found)
    yield from check_counts(arguments.encode(), "The arguments of tool_calls")
    messages: list[ChatMessage] = []
    for index, message in enumerate(given):
        if isinstance(message.content, str) and message.model_fields_set <= _PLAIN_FIELDS:
            # The fast path of most messages.
            messages.append(ChatMessage(_role_of(message), message.content))
        else:
            messages.append(_message_of(message, calls[index], f"messages.{index}"))
        if calls[index] or index % _STEP_MESSAGES == 0:
            yield
    return tuple(messages)


def read_tools(given: object) -> Steps[tuple[Tool, ...]]:
    """Return the tools of a call, none for None. Raises InvalidRequestError."""
    if given is None:
        return ()
    if not isinstance(given, list):
        raise InvalidRequestError("tools must be a list.", param="tools")
    tools: list[Tool] = []
    for index, one in enumerate(given):
        yield
        tools.append(_tool_of(one, f"tools.{index}"))
        tools[-1].check_limits(f"tools.{index}.function")
    return tuple(tools)


def read_choice(given: object, *, is_parallel: bool, has_tools: bool) -> ToolChoice:
    """Return the tool choice that `tool_choice` describes. Raises InvalidRequestError."""
    if given is None:
        given = "auto" if has_tools else "none"
    if isinstance(given, dict):
        named = read_part(ToolChoiceObject, given, "tool_choice")
        return ToolChoice(kind="named", name=named.function.name, is_parallel=is_parallel)
    if given == "none" or given == "auto" or given == "required":
        return ToolChoice(kind=given, is_parallel=is_parallel)
    raise InvalidRequestError(
        "tool_choice must be none, auto, required or a named function.",
        param="tool_choice",
    )


def _tool_of(given: object, where: str) -> Tool:
    function = read_part(
        Function, read_part(ToolObject, given, where).function, f"{where}.function"
    )
    if function.parameters is not None and not isinstance(function.parameters, dict):
        param = f"{where}.function.parameters"
        raise InvalidRequestError(f"{param} must be a JSON Schema object.", param=param)
    return Tool(
        name=function.name, description=function.description, parameters=function.parameters
    )


def _calls_of(message: Message, index: int) -> tuple[MessageCall, ...]:
    given = message.tool_calls
    if given is None or given == []:
        return ()
    where = f"messages.{index}.tool_calls"
    if message.role != "assistant":
        raise InvalidRequestError(f"{where} requires role = assistant.", param=where)
    if not isinstance(given, list) or len(given) > _MAX_CALLS:
        raise InvalidRequestError(
            f"{where} must be a list of at most {_MAX_CALLS} entries.", param=where
        )
    return tuple(read_part(MessageCall, one, f"{where}.{i}") for i, one in enumerate(given))


def _message_of(message: Message, calls: Sequence[MessageCall], where: str) -> ChatMessage:
    for name in ("tool_call_id", "name"):
        value = getattr(message, name)
        if value is None:
            continue
        if name == "tool_call_id" and message.role != "tool":
            raise InvalidRequestError(
                f"{where}.{name} requires role = tool.", param=f"{where}.{name}"
            )
        if len(value) > _MAX_ID_LENGTH:
            raise InvalidRequestError(
                f"{where}.{name} may have at most {_MAX_ID_LENGTH} characters.",
                param=f"{where}.{name}",
            )
    if message.annotations not in (None, []):
        param = f"{where}.annotations"
        raise InvalidRequestError(f"{param} is not supported.", param=param)
    reasoning = _reasoning_of(message, where)
    return ChatMessage(
        role=_role_of(message),
        content=_content_of(message.content, f"{where}.content", is_needed=not calls),
        tool_calls=tuple(_call_of(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=reasoning,
    )


def _reasoning_of(message: Message, where: str) -> str | None:
    given = {
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    found = {name: text for name, text in given.items() if text is not None}
    if not found:
        return None
    if message.role != "assistant":
        param = f"{where}.{next(iter(found))}"
        raise InvalidRequestError(f"{param} requires role = assistant.", param=param)
    if len(set(found.values())) > 1:
        param = f"{where}.reasoning"
        raise InvalidRequestError(
            f"{param} and reasoning_content must be equal if both are set.", param=param
        )
    return next(iter(found.values()))


def _role_of(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _call_of(call: MessageCall, where: str) -> MessageToolCall:
    param = f"{where}.function.arguments"
    try:
        arguments = from_json(call.function.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{param} must be a JSON object as a string.", param=param)
    return MessageToolCall(id=call.id, name=call.function.name, arguments=arguments)


def _is_text_part(part: object) -> bool:
    # As TextPart, whose validation would take ten times as long for each of thousands.
    return (
        type(part) is dict
        and (len(part) == 2 or (len(part) == 3 and "cache_control" in part))
        and part.get("type") == "text"
        and type(part.get("text")) is str
    )


def _content_of(given: object, where: str, *, is_needed: bool) -> str:
    if isinstance(given, str):
        return given
    if given is None:
        if is_needed:
            raise InvalidRequestError(f"{where} is required.", param=where)
        return ""
    if isinstance(given, list) and all(map(_is_text_part, given)):
        return "".join([part["text"] for part in given])
    if isinstance(given, list):
        _check_media(given, where)
    raise InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)


def _check_media(parts: list[object], where: str) -> None:
    """Raise InvalidRequestError that names a part that is not text, if its kind is known."""
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            param = f"{where}.{index}"
            raise InvalidRequestError(
                f"{param} is not supported: {kind} parts need a model that reads more than text.",
                param=param,
            )
