"""Merges later system messages into adjacent messages, for templates that do not take them.

Claude Code adds system messages during a conversation. Each text stays near its place, so that a
conversation begins with the same tokens as its earlier turns.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from cluster.serving.anthropic.turns import joined_texts
from cluster.serving.text.templates.chat_prompt import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["has_later_system_messages", "merge_system_messages"]

_ANSWERED = ("tool", "user")


def has_later_system_messages(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a system message is not the first message."""
    return any(message.role == "system" for message in messages[1:])


def merge_system_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return a conversation whose only system message, if any, is the first message.

    Those at the beginning become one. A later one becomes the end of the user's turn or of the
    tool's result before it; after a turn of the assistant, it becomes a part of what follows.
    """
    leading = tuple(takewhile(lambda message: message.role == "system", messages))
    merged = (
        [ChatMessage("system", joined_texts(one.content for one in leading))] if leading else []
    )
    waiting: list[str] = []
    for message in messages[len(leading) :]:
        if message.role == "system":
            waiting.append(message.content)
            continue
        merged.append(_with_text(merged, waiting, message))
        waiting = []
    if waiting:
        merged += _ending(merged, waiting)
    return tuple(merged)


def _with_text(
    merged: list[ChatMessage], waiting: Sequence[str], following: ChatMessage
) -> ChatMessage:
    """Put the waiting texts into the last message, or into the following one, which is returned."""
    if not waiting:
        return following
    if merged[-1].role in _ANSWERED or following.role not in _ANSWERED:
        merged += _ending(merged, waiting)
        return following
    # The result of a tool remains the first that follows its call.
    texts = (
        [following.content, *waiting] if following.role == "tool" else [*waiting, following.content]
    )
    return replace(following, content=joined_texts(texts))


def _ending(merged: list[ChatMessage], waiting: Sequence[str]) -> list[ChatMessage]:
    """Put the waiting texts into the last message, or return a message of the user with them."""
    last = merged[-1]
    if last.role not in _ANSWERED:
        return [ChatMessage("user", joined_texts(waiting))]
    merged[-1] = replace(last, content=joined_texts([last.content, *waiting]))
    return []
