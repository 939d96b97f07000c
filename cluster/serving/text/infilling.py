"""Prompts of models that are trained to fill in the middle between a prefix and a suffix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Infilling", "detect_infilling"]


@dataclass(frozen=True, slots=True)
class _Marks:
    """The special tokens of a family of models, in the order of the prompt."""

    first: str
    second: str
    last: str
    is_suffix_first: bool = False


_FORMATS = (
    # Qwen2.5-Coder and the Qwen models that share its tokenizer, CodeGemma, Granite 4.
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code.
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder, and DeepSeek models that share its tokens.
    _Marks(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    # Seed-Coder.
    _Marks("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", is_suffix_first=True),
)
_ENDS = (
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<repo_name>",
    "<file_sep>",
)
"""Tokens that begin something else after the middle."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """How one model is asked for the middle."""

    _marks: _Marks
    end_token_ids: tuple[int, ...]
    """The tokens that end the middle, beside those that end every output."""

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the text after which the model writes the middle."""
        marks = self._marks
        before, after = (suffix, prefix) if marks.is_suffix_first else (prefix, suffix)
        return f"{marks.first}{before}{marks.second}{after}{marks.last}"


def detect_infilling(token_id_of: Callable[[str], int | None]) -> Infilling | None:
    """Return how a model fills in the middle, or None if its tokenizer lacks the tokens."""
    for marks in _FORMATS:
        names = (marks.first, marks.second, marks.last)
        if all(token_id_of(name) is not None for name in names):
            ids = (token_id_of(name) for name in (*names, *_ENDS))
            return Infilling(marks, tuple(one for one in ids if one is not None))
    return None
