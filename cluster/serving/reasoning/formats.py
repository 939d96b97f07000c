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


_THINK = _Marks("<think>", "</think>")
_FORMATS: Mapping[ReasoningFormat, _Marks | None] = {
    "deepseek_r1": _Marks("<think>", "</think>", is_always_open=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "granite": _Marks("Here is my thought process:", "Here is my response:"),
    "mistral": _Marks("[THINK]", "[/THINK]"),
    "none": None,
    "olmo3": _THINK,
    "qwen3": _THINK,
    "seed_oss": _Marks("<seed:think>", "</seed:think>"),
}
REASONING_FORMATS = tuple(sorted(_FORMATS))
_DETECTED: tuple[ReasoningFormat, ...] = ("granite", "mistral", "seed_oss", "qwen3")
"""Formats that templates show, the more specific ones first."""


def detect_reasoning(template: str) -> ReasoningFormat:
    """Return the format of a chat template's reasoning."""
    for name in _DETECTED:
        marks = _FORMATS[name]
        if marks is not None and (marks.begin in template or marks.end in template):
            return name
    return "none"


def reasoning_of(name: ReasoningFormat, tokenizer: Tokenizer) -> Reasoning | None:
    """Return the reasoning of a format with the tokens of a model; None for `none`."""
    marks = _FORMATS[name]
    if marks is None:
        return None
    begin_id, end_id = (tokenizer.token_id_of(mark) for mark in (marks.begin, marks.end))
    return Reasoning(
        begin=marks.begin,
        end=marks.end,
        begin_token_id=begin_id,
        end_token_id=end_id,
        has_special_tokens=any(
            one is not None and tokenizer.token_bytes.is_special(one) for one in (begin_id, end_id)
        ),
        is_open=marks.is_always_open,
    )


def reasoning_after(reasoning: Reasoning, prompt_end: str) -> Reasoning | None:
    """Return the reasoning of a turn, given the end of its prompt; None if that has ended it."""
    end = prompt_end.rstrip(BLANKS)
    if end.endswith(reasoning.end):
        return None
    is_open = reasoning.is_open or end.endswith(reasoning.begin)
    return msgspec.structs.replace(reasoning, is_open=is_open)
