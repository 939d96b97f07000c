"""What is said between the controller's process and the one that makes its masks."""

from __future__ import annotations

import msgspec

from pagedray.request import FinishReason

__all__ = ["Ask", "AskMasks", "Follow", "Load", "LoadFailed", "Loaded", "Masks"]


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that begins to follow a grammar, and what else limits its tokens."""

    grammar_id: int
    min_tokens: int
    ignores_eos: bool
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    spent_s: float = 0.0
    """CPU time that it took in another process, when all of it is told again."""
    tenant: str = ""
    """Whose account pays for its masks."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """For one mask."""

    sequence_id: int
    token_ids: list[int]
    """Those generated since the sequence was last asked for."""
    follow: Follow | None = None
    """Given for a sequence that is not known yet."""


class AskMasks(msgspec.Struct, frozen=True, array_like=True):
    """For the masks of a step."""

    asks: list[Ask]
    ended_sequence_ids: list[int]
    """Never asked for again."""
    ended_grammar_ids: list[int]
    limit_s: float
    """Time in which there must be an answer; then the kernel ends the process."""


class Masks(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `AskMasks`."""

    ends: dict[int, FinishReason]
    """How sequences end, by their places in the question; their masks mean nothing."""
    complaints: list[str]
    """Why some of them end with an error."""
    words: bytes
    """A mask for each ask, one behind another."""
    culprits: list[int]
    """Places of sequences that the process could not go on with: it ends. They are in `ends`."""
    unmade: list[int]
    """Places whose masks were not made before that."""
    spent_s: list[float]
    """CPU time that each sequence took so far; 0 for one whose mask was not made."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A compiled grammar to keep, as xgrammar writes it in JSON."""

    grammar_id: int
    text: bytes
    ended_grammar_ids: list[int]
    """Others that nobody needs any more."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The grammar is kept."""

    num_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Why a grammar is not kept."""

    message: str
    is_out_of_memory: bool
    """Whether it may be kept when others are needed no more."""
