"""How model families mark their reasoning, by the names of vLLM's parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from pagedray.reasoning import BLANKS, Reasoning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.text.tokenizer import Tokenizer

__all__ = [
    "REASONING_FORMATS",
    "ReasoningFormat",
    "detect_reasoning",
    "reasoning_after",
    "reasoning_of",
]

ReasoningFormat = Literal[
    "deepseek_r1",
    "deepseek_v3",
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
    """What precedes the answer behind `end`, if turns are messages in channels."""


_THINK = _Marks("<think>", "</think>")
_FORMATS: Mapping[ReasoningFormat, _Marks | None] = {
    "deepseek_r1": _Marks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
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
    ),
    "qwen3": _THINK,
    "seed_oss": _Marks("<seed:think>", "</seed:think>"),
}
REASONING_FORMATS = tuple(sorted(_FORMATS))
_DETECTED: tuple[ReasoningFormat, ...] = (
    "openai_gptoss",
    "granite",
    "mistral",
    "seed_oss",
    "qwen3",
)
"""Formats that templates show, the more specific ones first."""


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
        answer_token_ids=tuple(tokenizer.encode(marks.answer_header, add_special_tokens=False)),
    )


def reasoning_after(reasoning: Reasoning, prompt_end: str) -> Reasoning | None:
    """Return the reasoning of a turn, given the end of its prompt; None if that has ended it."""
    end = prompt_end.rstrip(BLANKS)
    if end.endswith(reasoning.end):
        return None
    is_open = reasoning.is_open or end.endswith(reasoning.begin)
    return msgspec.structs.replace(reasoning, is_open=is_open)
