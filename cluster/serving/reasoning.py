"""Reasoning before an answer: its formats by model family, and a parser of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from cluster.serving.text.text_stream import overlap
from pagedray.errors import InvalidRequestError
from pagedray.request import MAX_WHITESPACE, WHITESPACE, AnswerHeader, Reasoning, ReasoningPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.sampling_params import Structure

__all__ = [
    "REASONING_FORMATS",
    "ReasoningFormat",
    "ReasoningReader",
    "detect_reasoning",
    "reasoning_after",
    "reasoning_of",
    "with_headers",
]

ReasoningFormat = Literal[
    "deepseek_r1",
    "deepseek_v3",
    "gemma4",
    "glm45",
    "granite",
    "mistral",
    "none",
    "olmo3",
    "openai_gptoss",
    "qwen3",
    "seed_oss",
]


@dataclass(frozen=True, slots=True)
class _Marks:
    """The texts around the reasoning of a family."""

    begin: str
    end: str
    is_always_open: bool = False
    """Whether the output begins inside the reasoning, unless the prompt has ended it."""
    special_texts: tuple[str, ...] = ()
    """Special tokens that are parts of the marks."""
    answer_header: str = ""
    """The text between `end` and the answer, if turns consist of messages in channels."""
    prompt_end: str = ""
    """The beginning of a header that is the end of a prompt."""


_HEADER_END = "<|message|>"

_THINK = _Marks("<think>", "</think>")

_FORMATS: Mapping[ReasoningFormat, _Marks | None] = {
    "deepseek_r1": _Marks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "gemma4": _Marks("<|channel>thought", "<channel|>", special_texts=("<|channel>",)),
    "glm45": _THINK,
    "granite": _Marks("Here is my thought process:", "Here is my response:"),
    "mistral": _Marks("[THINK]", "[/THINK]"),
    "none": None,
    "olmo3": _THINK,
    "openai_gptoss": _Marks(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        special_texts=("<|channel|>", "<|message|>", "<|end|>"),
        answer_header="<|start|>assistant<|channel|>final<|message|>",
        prompt_end="<|start|>assistant",
    ),
    "qwen3": _THINK,
    "seed_oss": _Marks("<seed:think>", "</seed:think>"),
}

REASONING_FORMATS = tuple(sorted(_FORMATS))

_DETECTED: tuple[ReasoningFormat, ...] = (
    "openai_gptoss",
    "gemma4",
    "granite",
    "mistral",
    "seed_oss",
    "qwen3",
)
"""Formats that are detected in a chat template, the more specific formats first."""


def detect_reasoning(template: str) -> ReasoningFormat:
    """Return the format of a chat template's reasoning."""
    for name in _DETECTED:
        marks = _FORMATS[name]
        if marks is None:
            continue
        shown = (marks.begin,) if marks.answer_header else (marks.begin, marks.end)
        if any(mark in template for mark in shown):
            return name
    return "none"


def reasoning_of(name: ReasoningFormat, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the reasoning of a format with the tokens of a model; None for `none`."""
    marks = _FORMATS[name]
    if marks is None:
        return None
    texts = dict.fromkeys((marks.begin, marks.end, *marks.special_texts))
    tokens = [
        (token_id, text) for text in texts if (token_id := tokenizer.token_id_of(text)) is not None
    ]
    return Reasoning(
        begin=marks.begin,
        end=marks.end,
        mark_tokens=tuple(tokens),
        has_special_tokens=any(
            tokenizer.token_bytes.is_special(token_id) for token_id, _ in tokens
        ),
        is_open=marks.is_always_open,
        answer_headers=_headers_of(((marks.answer_header, ""),), tokenizer),
        num_prompt_tokens=len(tokenizer.encode(marks.prompt_end, add_special_tokens=False)),
    )


def _headers_of(
    headers: Iterable[tuple[str, str]], tokenizer: Tokenizer
) -> tuple[AnswerHeader, ...]:
    """Return the headers that are not empty, with the tokens of a model.

    Each is given by its text, and the beginning of the structure for which it stands.
    """
    return tuple(
        AnswerHeader(tuple(tokenizer.encode(header, add_special_tokens=False)), text)
        for header, text in headers
        if header
    )


def with_headers(
    reasoning: Reasoning | None, structure: Structure | None, tokenizer: Tokenizer
) -> Reasoning | None:
    """Return a turn's reasoning, followed by the headers of its structure if that has any.

    Raises InvalidRequestError if the prompt has begun the message.
    """
    if structure is None or not structure.headers:
        return reasoning
    if reasoning is None or not reasoning.has_channels:
        raise InvalidRequestError(
            "A tool call cannot be forced, or be an alternative to a structure, in a message that "
            "the prompt begins: let the model begin the message.",
            param="structure",
        )
    headers = _headers_of(structure.headers, tokenizer)
    return msgspec.structs.replace(reasoning, answer_headers=headers)


def reasoning_after(reasoning: Reasoning, prompt_end: str) -> Reasoning | None:
    """Return the reasoning of a turn, given the end of its prompt; None if that has ended it."""
    end = prompt_end.rstrip(WHITESPACE)
    if end.endswith(reasoning.end):
        return None
    if reasoning.has_channels and end.endswith(_HEADER_END) and not end.endswith(reasoning.begin):
        # The prompt has begun an answer.
        return None
    is_open = reasoning.is_open or end.endswith(reasoning.begin)
    return msgspec.structs.replace(reasoning, is_open=is_open)


class ReasoningReader:
    """Splits the text of a turn into reasoning and the rest.

    Whitespace around the reasoning belongs to neither. Text is held back only while it may be a
    part of a mark.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self.place = ReasoningPlace.INSIDE if reasoning.is_open else ReasoningPlace.START
        self._begin, self._end = reasoning.begin, reasoning.end
        self._buffer = ""
        self._held_whitespace = ""
        self._may_begin = True
        """Whether all that was read may be a part of the mark at the beginning."""
        self._has_text = False
        """Whether there was reasoning that is not blank."""
        self._has_rest = False
        """Whether anything followed the reasoning that is not blank."""

    @property
    def is_passed(self) -> bool:
        """Whether all text that follows is returned as it is."""
        return self._has_rest

    def read_piece(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """Return the reasoning that the text completes, and the text after all reasoning."""
        if self._has_rest:
            return "", text
        self._buffer += text
        if self._may_begin:
            self._begin_or_not(is_last=is_last)
        found = self._inside(is_last=is_last) if self._is_inside else ""
        return found, self._behind()

    @property
    def _is_inside(self) -> bool:
        return self.place is ReasoningPlace.INSIDE and not self._may_begin

    def _begin_or_not(self, *, is_last: bool) -> None:
        begun = self._buffer.lstrip(WHITESPACE)
        num_whitespace = len(self._buffer) - len(begun)
        if begun.startswith(self._begin) and num_whitespace <= MAX_WHITESPACE:
            self.place, self._may_begin = ReasoningPlace.INSIDE, False
            self._buffer = begun[len(self._begin) :]
        elif is_last or num_whitespace > MAX_WHITESPACE or not self._begin.startswith(begun):
            self._may_begin = False
            if self.place is ReasoningPlace.START:
                self.place = ReasoningPlace.ABSENT

    def _inside(self, *, is_last: bool) -> str:
        before, mark, after = self._buffer.partition(self._end)
        if mark:
            self.place, self._buffer = ReasoningPlace.AFTER, after
            return self._written(before)
        num_held = 0 if is_last else overlap(self._buffer, self._end)
        length = len(self._buffer) - num_held
        before, self._buffer = self._buffer[:length], self._buffer[length:]
        return self._written(before)

    def _written(self, text: str) -> str:
        """Return reasoning without the whitespace around it."""
        if not self._has_text:
            text = text.lstrip(WHITESPACE)
        kept = text.rstrip(WHITESPACE)
        if not kept:
            self._held_whitespace += text
            return ""
        self._has_text = True
        written = self._held_whitespace + kept
        self._held_whitespace = text[len(kept) :]
        return written

    def _behind(self) -> str:
        if self.place is ReasoningPlace.AFTER:
            self._buffer = self._buffer.lstrip(WHITESPACE)
        elif self.place is not ReasoningPlace.ABSENT:
            return ""
        text, self._buffer = self._buffer, ""
        self._has_rest = bool(text)
        return text
