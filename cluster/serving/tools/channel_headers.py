"""The headers of messages in channels, as gpt-oss writes them (OpenAI's harmony format).

A header ends with `<|message|>`. The first one of a turn may lack `<|start|>assistant`, which ends
its prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagedray.reasoning import MAX_WHITESPACE, WHITESPACE

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "ANSWER_HEADER",
    "CHANNEL_MARK",
    "END_MARKS",
    "MAX_HEADER_LENGTH",
    "MESSAGE_MARK",
    "START_MARK",
    "Header",
    "begins_header",
    "call_header",
    "is_cut_header",
    "read_header",
]

CHANNEL_MARK = "<|channel|>"
MESSAGE_MARK = "<|message|>"
START_MARK = "<|start|>"
END_MARKS = ("<|end|>", "<|call|>", "<|return|>", START_MARK)
"""The marks that end a message; the last mark also begins the next message."""
MAX_HEADER_LENGTH = 512

ANSWER_HEADER = f"{START_MARK}assistant{CHANNEL_MARK}final{MESSAGE_MARK}"
"""The header of an answer, as the model writes it after its reasoning."""
_FUNCTIONS = "functions."
_HEADER_STARTS = (CHANNEL_MARK, START_MARK, MESSAGE_MARK)
_FIRST_STARTS = (*_HEADER_STARTS, "to=")
_MAX_BEGIN_LENGTH = MAX_WHITESPACE + 16
"""Length of the text that shows whether a header begins."""
_CHANNEL = re.compile(re.escape(CHANNEL_MARK) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NO_HEADER = re.compile(re.escape(START_MARK) + r"[^\w<]")
"""A mark without the role that follows it in a header."""
_CUT_HEADER = re.compile(
    r"\s*+(?:<\|start\|>(?:[\w.:-]++\s*+)?+)?+"
    r"(?:to=[^\s<]*+\s*+)?+"
    r"(?:<\|channel\|>\s*+(?:\w++\s*+)?+)?+"
    r"(?:to=[^\s<]*+\s*+)?+"
    r"(?:<\|constrain\|>\s*+)?+(?:\w++\s*+)?+"
    r"(?:<(?:\|\w*+\|?+)?+)?+"
)
"""A header of which the end is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fields of a message's header."""

    kind: Literal["call", "content", "reasoning"]
    function: str = ""
    """The function of a call."""
    has_recipient: bool


def call_header(function: str) -> str:
    """Return the header of a call, as the model writes it."""
    channel = f"{CHANNEL_MARK}commentary to={_FUNCTIONS}{function} <|constrain|>json"
    return f"{START_MARK}assistant{channel}{MESSAGE_MARK}"


def read_header(text: str, tool_names: Collection[str]) -> Header:
    """Return the fields of a header, given its text before `<|message|>`."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
    has_recipient = recipient is not None
    if name in tool_names:
        return Header(kind="call", function=name, has_recipient=has_recipient)
    is_reasoning = channel is not None and channel[1] == "analysis"
    return Header(kind="reasoning" if is_reasoning else "content", has_recipient=has_recipient)


def begins_header(text: str, *, is_first: bool) -> bool | None:
    """Return whether the text where a message may begin is a header; None if undecided."""
    starts = _FIRST_STARTS if is_first else _HEADER_STARTS
    begun = text[:_MAX_BEGIN_LENGTH].lstrip(WHITESPACE)
    num_whitespace = min(len(text), _MAX_BEGIN_LENGTH) - len(begun)
    if num_whitespace > MAX_WHITESPACE or _NO_HEADER.match(begun):
        return False
    if begun.startswith(starts) and begun != START_MARK:
        return True
    return None if any(one.startswith(begun) for one in starts) else False


def is_cut_header(text: str) -> bool:
    """Return whether a text without `<|message|>` is a header of which the end is missing."""
    if len(text) > MAX_HEADER_LENGTH or _CUT_HEADER.fullmatch(text) is None:
        return False
    return CHANNEL_MARK in text or START_MARK in text
