"""The messages and tools of a conversation in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue

from cluster.serving.json_body import check_counts, read_arguments
from cluster.serving.schema.body import OpenPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.serving.schema.field_errors import missing_field
from cluster.serving.text.templates.chat_prompt import ChatMessage, MessageToolCall
from cluster.serving.tools.tool import MAX_ID_LENGTH
from pagedray.errors import InvalidRequestError
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CONTENT_PARTS",
    "CalledFunction",
    "Message",
    "MessageCall",
    "RefusalPart",
    "TextPart",
    "read_messages",
]

_MEDIA = frozenset(
    (
        "audio_url",
        "file",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video_url",
    )
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
            raise InvalidRequestError(f"{where} is required.", param=where)
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
        raise InvalidRequestError(
            f"{where} is not supported: the model only reads text, not {kind} parts.",
            param=where,
        )
    found = CONTENT_PARTS.get(kind) if isinstance(kind, str) else None
    if found is None:
        *names, last = (f"'{name}'" for name in CONTENT_PARTS)
        raise InvalidRequestError(
            f"{where}.type must be one of {', '.join(names)} or {last}, not {quote(kind)}.",
            param=f"{where}.type",
        )
    if found is not TextPart and role != "assistant":
        raise InvalidRequestError(f"{where} of type {kind} requires role = assistant.", param=where)
    return read_part(found, given, where)


def _not_parts(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)


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
    arguments: str = Field(
        "{}", description="A JSON object as a string; an empty string is an empty object."
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
    content: Any = Field(  # Any: an error names the invalid part
        None,
        description="A string or an array of strings and parts; optional with calls, reasoning "
        "or a refusal. Special tokens of the model are treated as ordinary text, in every text of "
        "a message or tool.",
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"anyOf": [{"type": "string"}, *_PART_SCHEMAS]},
                },
            ]
        },
    )
    tool_calls: Any = Field(  # Any: as above
        None,
        description="The tool calls of an assistant message.",
        json_schema_extra={
            "type": "array",
            "items": named_schema("MessageCall"),
        },
    )
    function_call: Any = Field(  # Any: as above
        None,
        description="The older form of `tool_calls`: the call of an assistant message.",
        json_schema_extra=named_schema("CalledFunction"),
    )
    tool_call_id: str | None = Field(
        None, description="The id of the call that a tool message answers."
    )
    name: str | None = Field(
        None,
        description="The name of the author, or the tool of a tool message. A message with the "
        "role `function` requires it: it answers the last `function_call` of that name.",
    )
    reasoning_content: str | None = Field(
        None, description="The model's reasoning before an assistant message."
    )
    reasoning: str | None = Field(None, description="The same as `reasoning_content`.")
    refusal: str | None = Field(
        None,
        description="A refusal of the assistant, which is the message's text; requires that "
        "`content` is null or empty.",
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
        raise InvalidRequestError(f"{where} is required with role = function.", param=where)
    given = message.tool_calls
    has_calls = given is not None and given != []
    if message.function_call is not None:
        where = f"messages.{index}.function_call"
        _check_assistant(message, where)
        if has_calls:
            raise InvalidRequestError(f"{where} cannot be combined with tool_calls.", param=where)
        called = read_part(CalledFunction, message.function_call, where)
        # Some templates require ids of nine letters and digits.
        return (MessageCall(id=f"call{index:05}", function=called),)
    if not has_calls:
        return ()
    where = f"messages.{index}.tool_calls"
    _check_assistant(message, where)
    if not isinstance(given, list):
        raise InvalidRequestError(f"{where} must be a list.", param=where)
    return tuple(
        read_part(MessageCall, call, f"{where}.{number}") for number, call in enumerate(given)
    )


def _check_assistant(message: Message, where: str) -> None:
    if message.role != "assistant":
        raise InvalidRequestError(f"{where} requires role = assistant.", param=where)


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
        raise InvalidRequestError(
            f"{where}.reasoning and thinking parts must be equal if both are given.",
            param=f"{where}.reasoning",
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
            raise InvalidRequestError(f"{param} requires role = tool.", param=param)
        _check_length(message.tool_call_id, param)
    if message.name is not None:
        _check_length(message.name, f"{where}.name")
    if message.refusal:
        param = f"{where}.refusal"
        _check_assistant(message, param)
        if message.content not in (None, "", []):
            raise InvalidRequestError(f"{param} cannot be combined with content.", param=param)


def _check_length(given: str, param: str) -> None:
    if len(given) > MAX_ID_LENGTH:
        raise InvalidRequestError(
            f"{param} may have at most {MAX_ID_LENGTH} characters.", param=param
        )


def _reasoning_of(message: Message, where: str) -> str | None:
    given = {
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
    }
    found = {name: text for name, text in given.items() if text}
    if not found:
        is_empty = message.role == "assistant" and "" in given.values()
        return "" if is_empty else None
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
    return _ROLES.get(message.role, message.role)


def _call_of(call: MessageCall, where: str) -> MessageToolCall:
    arguments = read_arguments(call.function.arguments, f"{where}.arguments")
    return MessageToolCall(id=call.id, name=call.function.name, arguments=arguments)
