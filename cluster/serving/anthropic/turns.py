"""Combines consecutive messages of one role, as Anthropic's API does."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.text.templates.chat_prompt import ChatMessage

__all__ = ["combine_turns", "joined_texts"]

_COMBINED = ("user", "assistant")


def combine_turns(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return a conversation in which a message of the user or the assistant never follows another.

    Results of tools and system messages remain separate.
    """
    combined: list[ChatMessage] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = list(group)
        combined += [_as_one(turns)] if role in _COMBINED and len(turns) > 1 else turns
    return tuple(combined)


def joined_texts(texts: Iterable[str]) -> str:
    """Return texts with a blank line between them, without empty ones."""
    return "\n\n".join(text for text in texts if text)


def _as_one(turns: Sequence[ChatMessage]) -> ChatMessage:
    reasoning = [one.reasoning for one in turns if one.reasoning is not None]
    return replace(
        turns[0],
        content=joined_texts(one.content for one in turns),
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in turns)),
        reasoning=joined_texts(reasoning) if reasoning else None,
    )
