"""The messages of Anthropic's API; content is a text or a list of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue

from cluster.serving.json_body import OpenPart, described, missing_field, named_schema, read_part
from cluster.serving.text.template_arguments import ChatMessage, MessageToolCall
from cluster.serving.tools.tool import MAX_ID_LENGTH, check_id
from pagedray.errors import invalid_field

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["AnthropicMessage", "read_anthropic_messages", "read_system_prompt", "read_text"]

_ATTRIBUTION = "x-anthropic-billing-header:"


def _content_field(*blocks: str) -> Any:  # Any: a pydantic field, read where it is used
    kinds: list[JsonValue] = [named_schema(name) for name in blocks]
    schema: dict[str, JsonValue] = {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": kinds}}]
    }
    return Field(json_schema_extra=schema)


class AnthropicMessage(OpenPart):
    """One message of a conversation; the response continues a last one of the assistant."""

    role: Literal["user", "assistant", "system"]
    content: Any = _content_field(
        "TextBlock", "ToolUseBlock", "ToolResultBlock", "ThinkingBlock", "RedactedThinkingBlock"
    )


class TextBlock(OpenPart):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(OpenPart):
    """A tool call of the assistant."""

    type: Literal["tool_use"]
    id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    name: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    input: Any = Field(json_schema_extra={"type": "object"})  # Any: JSON


class ToolResultBlock(OpenPart):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(json_schema_extra={"maxLength": MAX_ID_LENGTH})
    content: Any = Field(  # Any: read where it is used
        None,
        json_schema_extra={
            "anyOf": [{"type": "string"}, {"type": "array", "items": named_schema("TextBlock")}]
        },
    )
    is_error: bool = described("Whether the model sees `Error: ` before the text.", False)


class ThinkingBlock(OpenPart):
    """What the model thought before its answer; the chat template decides whether it is read."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(OpenPart):
    """Thoughts of another model, which are left out."""

    type: Literal["redacted_thinking"]
    data: str


_Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock

BLOCKS: Mapping[str, type[_Block]] = {
    "redacted_thinking": RedactedThinkingBlock,
    "text": TextBlock,
    "thinking": ThinkingBlock,
    "tool_result": ToolResultBlock,
    "tool_use": ToolUseBlock,
}
_MEDIA = frozenset(("audio", "container_upload", "document", "file", "image", "video"))
_ROLES: Mapping[str, str] = {
    "redacted_thinking": "assistant",
    "thinking": "assistant",
    "tool_result": "user",
    "tool_use": "assistant",
}
"""The role that each of these blocks requires."""


def read_anthropic_messages(given: Sequence[AnthropicMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages for the chat template. Raises InvalidRequestError."""
    messages: list[ChatMessage] = []
    for index, message in enumerate(given):
        where = f"messages.{index}.content"
        if isinstance(message.content, str):
            messages.append(ChatMessage(message.role, message.content))
            continue
        if not isinstance(message.content, list):
            raise invalid_field(where, "must be a string or a list of content blocks.")
        # The assistant's may be empty: so is the response of a model that ends at once.
        if not message.content and message.role != "assistant":
            raise invalid_field(where, "must contain at least one content block.")
        if message.role == "system":
            text = read_text(message.content, where)
            messages.append(ChatMessage("system", text))
        elif message.role == "assistant":
            messages.append(_assistant_turn(message.content, where))
        else:
            messages += _user_turns(message.content, where)
    return tuple(messages)


def read_text(given: object, where: str) -> str:
    """Return a text that is a string or a list of text blocks. Raises InvalidRequestError."""
    return "".join(_texts(given, where))


def read_system_prompt(given: object) -> str:
    """Return the system prompt without the block in which Claude Code names its version.

    That block is not an instruction, and may differ between conversations. In the prompt, it would
    then keep later blocks from being found in the prefix cache. Raises InvalidRequestError.
    """
    texts = _texts(given, "system")
    if not isinstance(given, list):
        return "".join(texts)
    return "".join(text for text in texts if not text.startswith(_ATTRIBUTION))


def _texts(given: object, where: str) -> list[str]:
    if given is None or isinstance(given, str):
        return [given or ""]
    if not isinstance(given, list):
        raise invalid_field(where, "must be a string or a list of text blocks.")
    texts: list[str] = []
    for place, one in enumerate(given):
        block = _block_of(one, f"{where}.{place}", None)
        if not isinstance(block, TextBlock):
            param = f"{where}.{place}"
            raise invalid_field(param, f"must be a text block, not {block.type}.")
        texts.append(block.text)
    return texts


def _block_of(given: object, where: str, role: str | None) -> _Block:
    kind = given.get("type") if isinstance(given, dict) else None
    if isinstance(given, dict) and kind is None:
        raise missing_field(("type",), given, where, BLOCKS.values())
    part = BLOCKS.get(kind) if isinstance(kind, str) else None
    if isinstance(kind, str) and kind in _MEDIA:
        raise invalid_field(
            where, f"is not supported: the model only reads text, not {kind} blocks."
        )
    if not isinstance(given, dict) or part is None:
        shown = kind[:40] if isinstance(kind, str) and kind.isidentifier() else "this kind"
        raise invalid_field(
            where,
            f"is not supported: content blocks of {shown}; the model reads "
            f"{', '.join(sorted(BLOCKS))}.",
        )
    assert isinstance(kind, str)
    if role is not None and _ROLES.get(kind, role) != role:
        raise invalid_field(where, f"of type {kind} requires role = {_ROLES[kind]}.")
    block = read_part(part, given, where)
    if isinstance(block, ToolUseBlock):
        check_id(block.id, f"{where}.id")
        check_id(block.name, f"{where}.name")
        if not isinstance(block.input, dict):
            raise invalid_field(f"{where}.input", "must be an object.")
    if isinstance(block, ToolResultBlock):
        check_id(block.tool_use_id, f"{where}.tool_use_id")
    return block


def _assistant_turn(given: Sequence[object], where: str) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageToolCall] = []
    for place, one in enumerate(given):
        block = _block_of(one, f"{where}.{place}", "assistant")
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            calls.append(MessageToolCall(id=block.id, name=block.name, arguments=block.input))
    return ChatMessage(
        "assistant",
        "".join(texts),
        tool_calls=tuple(calls),
        reasoning="".join(thoughts) if thoughts else None,
    )


def _user_turns(given: Sequence[object], where: str) -> list[ChatMessage]:
    """Return messages in the order of the blocks: each result of a tool is one of its own."""
    turns: list[ChatMessage] = []
    texts: list[str] = []
    for place, one in enumerate(given):
        block = _block_of(one, f"{where}.{place}", "user")
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        assert isinstance(block, ToolResultBlock)
        if texts:
            turns.append(ChatMessage("user", "".join(texts)))
            texts = []
        text = read_text(block.content, f"{where}.{place}.content")
        content = f"Error: {text}" if block.is_error else text
        turns.append(ChatMessage("tool", content, tool_call_id=block.tool_use_id))
    if texts:
        turns.append(ChatMessage("user", "".join(texts)))
    return turns
