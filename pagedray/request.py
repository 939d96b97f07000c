"""Requests, the grammars that constrain them, and their finish reasons."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pagedray.reasoning import Reasoning
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FinishReason", "Grammar", "Matcher", "Request"]


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Matcher(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def error(self) -> str:
        """Why the structure ended the sequence with an error; empty if a defect did."""

    @property
    def is_costly(self) -> bool:
        """Whether the last mask took so long that no step should wait for the next mask."""

    @property
    def is_free(self) -> bool:
        """Whether it allows every token from the last mask on, so that no other mask is needed."""


class Grammar(Protocol):
    """A compiled structure, shared by any number of sequences."""

    @property
    def num_mask_bytes(self) -> int:
        """Size of a mask in bytes."""

    def matcher(self, request: Request) -> Matcher:
        """Return a matcher for a new completion of the request."""

    def masks(
        self,
        # Any: the matchers are its own kind's.
        asked: Sequence[tuple[Any, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        """Return the masks of allowed tokens, or the finish reason if none is; never raises.

        It waits up to `wait_s` for the first `num_awaited` of them, and not for the others. A mask
        that is not made by then is None; a later call that asks for it again returns it.

        `asked` pairs matchers with all tokens of their sequences, the prompt included. Matchers may
        belong to any grammar of the same model. Bit `i % 32` of int32 word `i // 32` is token `i`.
        """


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request."""

    id: str
    """Assigned by the server, never by the client."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """The client's seed, or a random seed."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion unless `ignore_eos`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no completion contains, from `sampling.bad_words`."""
    tenant: str = ""
    """The tenant that sent the request; prefixes are shared only within a tenant."""
    cache_salt: str = ""
    """Prefixes are shared only by requests of a tenant that have the same salt."""
    weight: float = 1.0
    """The tenant's share of the engine, relative to other tenants."""
    priority: int = 0
    """Requests of lower values are served first."""
    deadline_s: float | None = None
    """When the request is aborted, on the monotonic clock."""
    grammar: Grammar | None = None
    """The compiled `sampling.structure`, with the limit on the reasoning before it."""
    reasoning: Reasoning | None = None
    """How the model's reasoning is marked, which the structure does not apply to; None if it does
    not reason or the prompt is not a conversation."""
    generated_token_ids: tuple[tuple[int, ...] | None, ...] = ()
    """The tokens that each sequence generated in another replica, None for an ended sequence; empty
    for a request that begins with its prompt. Never from a client.
    """

    @property
    def mask_start(self) -> int | None:
        """The number of generated tokens after which its tokens are masked; None is never."""
        if self.grammar is None:
            return None
        budget = self.sampling.thinking_token_budget
        if self.sampling.structure is not None or budget is None:
            return 0
        # Before, the reasoning cannot have as many tokens.
        return budget

    @property
    def open_indices(self) -> range | tuple[int, ...]:
        """The indices of the sequences that the engine runs."""
        if not self.generated_token_ids:
            return range(self.sampling.n)
        generated = enumerate(self.generated_token_ids)
        return tuple(index for index, token_ids in generated if token_ids is not None)
