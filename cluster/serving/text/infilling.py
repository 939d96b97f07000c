"""Fill-in-the-middle prompts: the model generates the text between a prefix and a suffix.

The authors of the models published the formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Infilling", "detect_infilling"]


@dataclass(frozen=True, slots=True)
class _Marks:
    """The special tokens of a model family, in their order in the prompt."""

    first: str
    second: str
    last: str = ""
    is_suffix_first: bool = False
    is_of_parts: bool = False
    """Whether texts are encoded separately from the marks, the suffix without a leading space.

    SentencePiece tokenizers begin every text with a space, which precedes no suffix in the model's
    training data.
    """


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
    # The CodeLlama models that are trained for it; the others lack the tokens.
    _Marks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", is_of_parts=True),
    # Codestral, and the Mistral models that share its tokens.
    _Marks("[SUFFIX]", "[PREFIX]", is_suffix_first=True, is_of_parts=True),
)
_ENDS = (
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<repo_name>",
    "<file_sep>",
    "\u2581<EOT>",
    "[MIDDLE]",
)
"""Tokens that end the middle, or begin something else after it."""
_LEAD = "\u263a"
"""A character before the suffix, which gets the leading space; its tokens are removed."""


class _Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode_without_gil(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    @property
    def bos_token_ids(self) -> tuple[int, ...]:
        """The token that begins a prompt, if any."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Encodes the fill-in-the-middle prompts of one model."""

    _marks: _Marks
    _mark_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    """The tokens that end the middle, in addition to the tokens that end every output."""

    def encode(
        self, prefix: str, suffix: str, encoder: _Encoder, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the tokens after which the model generates the middle.

        Without `add_special_tokens`, the marks are the only special tokens.
        """
        marks = self._marks
        if not marks.is_of_parts:
            before, after = (suffix, prefix) if marks.is_suffix_first else (prefix, suffix)
            return encoder.encode_without_gil(
                f"{marks.first}{before}{marks.second}{after}{marks.last}",
                add_special_tokens=add_special_tokens,
            )
        first, second, *last = self._mark_ids
        prefix_ids, lead_ids, suffix_ids = (
            encoder.encode_without_gil(text, add_special_tokens=False)
            for text in (prefix, _LEAD, _LEAD + suffix)
        )
        del suffix_ids[: len(lead_ids)]
        before_ids, after_ids = (
            (suffix_ids, prefix_ids) if marks.is_suffix_first else (prefix_ids, suffix_ids)
        )
        start_ids = encoder.bos_token_ids if add_special_tokens else ()
        return [*start_ids, first, *before_ids, second, *after_ids, *last]


def detect_infilling(token_id_of: Callable[[str], int | None]) -> Infilling | None:
    """Return the encoder of a model's prompts, or None if its tokenizer lacks their tokens."""
    ends = [one for one in map(token_id_of, _ENDS) if one is not None]
    for marks in _FORMATS:
        names = [name for name in (marks.first, marks.second, marks.last) if name]
        ids = [one for one in map(token_id_of, names) if one is not None]
        if len(ids) == len(names):
            return Infilling(marks, tuple(ids), (*ids, *ends))
    return None
