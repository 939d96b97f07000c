"""The input of OpenAI's Responses API: a text, or a list of messages, tool calls and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cluster.serving.json_bodies.call_arguments import read_arguments
from cluster.serving.json_bodies.json_body import check_counts
from cluster.serving.openai.bodies.content_parts import RefusalPart, TextPart
from cluster.serving.responses.function_tools import model_name
from cluster.serving.schema.body import OpenPart, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.serving.schema.field_errors import missing_field
from cluster.serving.text.templates.chat_prompt import ChatMessage, MessageToolCall
from cluster.serving.tools.call_id import MAX_ID_LENGTH, check_id
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["ITEMS", "read_items"]


class MessageItem(OpenPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any = Field(  # Any: read where it is used
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"anyOf": [named_schema("TextPart"), named_schema("RefusalPart")]},
                },
            ]
        }
    )


class FunctionCallItem(OpenPart):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    name: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    namespace: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})
    arguments: str = Field(description="A JSON object as a string.")
    is_async: Literal[False] = Field(False, alias="async")


class FunctionOutputItem(OpenPart):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    output: Any = Field(  # Any: read where it is used
        json_schema_extra={
            "anyOf": [{"type": "string"}, {"type": "array", "items": named_schema("TextPart")}]
        }
    )
    name: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})
    namespace: str | None = Field(None, json_schema_extra={"maxLength": MAX_ID_LENGTH})


class ReasoningItem(OpenPart):
    """What the model thought; the chat template decides whether it is read."""

    type: Literal["reasoning"]
    content: Any = Field(  # Any: read where it is used
        None, json_schema_extra={"type": "array", "items": {"type": "object"}}
    )


_Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem

ITEMS: Mapping[str, type[_Item]] = {
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "message": MessageItem,
    "reasoning": ReasoningItem,
}


class _Turns:
    """Collects messages; consecutive text, reasoning and calls of the assistant are one of them."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[MessageToolCall] = []
        self._is_open = False

    def add(self, message: ChatMessage) -> None:
        """Add a message of another role."""
        self.end()
        self.messages.append(message)

    def say(self, text: str) -> None:
        if self._texts or self._calls:
            self.end()
        self._is_open = True
        self._texts.append(text)

    def think(self, text: str) -> None:
        if self._texts or self._calls:
            self.end()
        if text:
            self._is_open = True
            self._thoughts.append(text)

    def call(self, call: MessageToolCall) -> None:
        self._is_open = True
        self._calls.append(call)

    def end(self) -> None:
        """End the assistant's turn, if it is open."""
        if self._is_open:
            reasoning = "".join(self._thoughts) if self._thoughts else None
            text, calls = "".join(self._texts), tuple(self._calls)
            self.messages.append(
                ChatMessage("assistant", text, tool_calls=calls, reasoning=reasoning)
            )
        self._texts, self._thoughts, self._calls = [], [], []
        self._is_open = False


def read_items(given: object) -> tuple[ChatMessage, ...]:
    """Return the messages for the chat template. Raises InvalidRequestError."""
    if isinstance(given, str):
        return (ChatMessage("user", given),)
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            "input must be a string or a non-empty list of items.", param="input"
        )
    items: list[_Item] = []
    for index, one in enumerate(given):
        items.append(_item_of(one, f"input.{index}"))
    arguments = "".join(one.arguments for one in items if isinstance(one, FunctionCallItem))
    check_counts(arguments.encode("utf-8", "surrogatepass"), "The arguments of calls")
    turns = _Turns()
    for index, item in enumerate(items):
        _add_item(item, turns, f"input.{index}")
    turns.end()
    return tuple(turns.messages)


def _add_item(item: _Item, turns: _Turns, where: str) -> None:
    if isinstance(item, MessageItem):
        text = _text_of(item.content, f"{where}.content", role=item.role)
        if item.role == "assistant":
            turns.say(text)
        else:
            turns.add(ChatMessage("system" if item.role == "developer" else item.role, text))
    elif isinstance(item, FunctionCallItem):
        turns.call(_call_of(item, where))
    elif isinstance(item, FunctionOutputItem):
        check_id(item.call_id, f"{where}.call_id")
        text = _text_of(item.output, f"{where}.output", role="tool")
        name = None
        if item.name is not None:
            name = model_name(item.name, item.namespace)
            check_id(name, f"{where}.name")
        turns.add(ChatMessage("tool", text, tool_call_id=item.call_id, name=name))
    else:
        turns.think(_thoughts_of(item.content, f"{where}.content"))


def _item_of(given: object, where: str) -> _Item:
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{where} must be an object.", param=where)
    if not given.get("type") and given.get("role") is None:
        # Only messages may do without their type.
        raise missing_field(("type", "role"), given, where, ITEMS.values())
    kind = given.get("type") or "message"
    part = ITEMS.get(kind) if isinstance(kind, str) else None
    if part is None:
        shown = kind[:40] if isinstance(kind, str) and kind.isidentifier() else "this kind"
        raise InvalidRequestError(
            f"{where} is not supported: items of {shown}; the model reads "
            f"{', '.join(sorted(ITEMS))}.",
            param=where,
        )
    return read_part(part, given, where)


def _text_of(given: object, where: str, *, role: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)
    texts: list[str] = []
    for index, one in enumerate(given):
        texts.append(_part_text(one, f"{where}.{index}", role))
    return "".join(texts)


def _part_text(given: object, where: str, role: str) -> str:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
        raise InvalidRequestError(
            f"{where} is not supported: the model only reads text, not {kind} parts.",
            param=where,
        )
    if kind == "refusal" and role == "assistant":
        return read_part(RefusalPart, given, where).refusal
    return read_part(TextPart, given, where).text


def _thoughts_of(given: object, where: str) -> str:
    if given is None:
        return ""
    texts = [one.get("text") if isinstance(one, dict) else None for one in _list_of(given, where)]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{where} must have parts with a text.", param=where)
    return "".join(text for text in texts if isinstance(text, str))


def _list_of(given: object, where: str) -> Sequence[object]:
    if isinstance(given, list):
        return given
    raise InvalidRequestError(f"{where} must be a list.", param=where)


def _call_of(item: FunctionCallItem, where: str) -> MessageToolCall:
    check_id(item.call_id, f"{where}.call_id")
    name = model_name(item.name, item.namespace)
    check_id(item.name, f"{where}.name")
    check_id(name, f"{where}.namespace")
    arguments = read_arguments(item.arguments, f"{where}.arguments")
    return MessageToolCall(id=item.call_id, name=name, arguments=arguments)
