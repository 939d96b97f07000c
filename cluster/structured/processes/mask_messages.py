"""The messages between the replica and the process that makes masks."""

from __future__ import annotations

import msgspec

from pagedray.request import FinishReason

__all__ = [
    "GrammarLoaded",
    "LoadFailed",
    "LoadGrammar",
    "MaskQuery",
    "MatcherStart",
    "StepQuery",
    "StepReply",
]


class MatcherStart(msgspec.Struct, frozen=True, array_like=True):
    """Starts a sequence's matcher: its grammar, and what else limits its tokens."""

    grammar_id: int
    min_tokens: int
    ignores_eos: bool
    eos_token_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    cpu_s: float = 0.0
    """CPU time that the sequence took in another process, if its tokens are replayed."""
    tenant: str = ""
    """The tenant whose CPU budget its masks are charged to."""


class MaskQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for one mask."""

    sequence_id: int
    token_ids: list[int]
    """Tokens generated since the last query of the sequence."""
    start: MatcherStart | None = None
    """Set if the process does not know the sequence."""


class StepQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the masks of a step."""

    queries: list[MaskQuery]
    ended_sequence_ids: list[int]
    ended_grammar_ids: list[int]
    limit_s: float
    """Time after which the kernel kills the process unless it has replied."""


class StepReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to a `StepQuery`. Rows are indices of its queries."""

    finish_reasons: dict[int, FinishReason]
    """How sequences end, by row; their masks are undefined."""
    errors: list[str]
    """Why some of them end with an error."""
    words: bytes
    """The masks of all rows, concatenated."""
    offenders: list[int]
    """Rows that took too long or too much memory; the process exits. In `finish_reasons` too."""
    missing: list[int]
    """Rows whose masks were not made before that."""
    cpu_s: list[float]
    """CPU time that each sequence has taken; 0 for one whose mask was not made."""


class LoadGrammar(msgspec.Struct, frozen=True, array_like=True):
    """Loads a compiled grammar, as JSON of xgrammar."""

    grammar_id: int
    text: bytes
    ended_grammar_ids: list[int]


class GrammarLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """The grammar is loaded."""

    num_bytes: int


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The grammar could not be loaded."""

    message: str
    is_out_of_memory: bool
    """Whether it may succeed once other grammars are freed."""
