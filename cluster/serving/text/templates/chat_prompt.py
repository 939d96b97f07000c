"""A conversation, as frontends read it and chat templates render it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ChatMessage", "ChatPrompt", "MessageToolCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageToolCall:
    """A tool call of an earlier turn of the assistant."""

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[MessageToolCall, ...] = ()
    """The tool calls of an assistant's turn."""
    tool_call_id: str | None = None
    """The id of the call that a message of a tool answers."""
    name: str | None = None
    """The name of the author; in a tool's turn, of the tool."""
    reasoning: str | None = None
    """The model's reasoning before an assistant's turn."""
    extra: Mapping[str, object] | None = None
    """Further fields that the chat template may read."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model to continue."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """Tools in the format of chat templates: `{"type": "function", "function": ...}`."""
    adds_generation_prompt: bool = True
    """Whether the rendered text ends with the start of an assistant turn."""
    continues_final_message: bool = False
    """Whether the model continues the text of the last message, in that message's role."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Values of further variables that the chat template reads."""
    template: str | None = None
    """The source of a chat template that replaces the model's."""
    is_template_trusted: bool = False
    """Whether `template` comes from the operator's program, and not from a client."""
