"""Tokens of a call, stored outside its replica so that another replica can continue.

Whatever forwards a replica's responses keeps them, such as Ray Serve's proxies; they never come
from a client. Plain data without a protocol.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

__all__ = [
    "CAUSES",
    "CONTINUATION_KEY",
    "PROGRESS_KEY",
    "Cause",
    "Continuation",
    "Encoded",
    "Progress",
    "SequenceProgress",
]

CONTINUATION_KEY = "pagedray.continuation"
"""The key of a call's Continuation in its ASGI scope, which clients cannot set."""
PROGRESS_KEY = "pagedray.progress"
"""The key of an encoded Progress in an ASGI message of the response."""

Cause = Literal["died", "hung", "truncated", "failed"]
"""Why a call continues in another replica: its own died, did not respond, ended the stream too
early, or reported that its engine failed."""

CAUSES: tuple[Cause, ...] = get_args(Cause)
_SEEDS = 2**63


class SequenceProgress(NamedTuple):
    """Tokens of one sequence of a call."""

    number: int
    """Its index among all sequences of the call, in the order of prompts."""
    token_ids: tuple[int, ...]
    is_finished: bool


Encoded = tuple[int, tuple[tuple[int, tuple[int, ...], bool], ...], int, bool, bool]
"""A Progress as a plain tuple, which is pickled twice as fast."""


class Progress(NamedTuple):
    """The progress of a call by a message of its stream."""

    num_sequences: int
    """The sequences of the call."""
    sequences: tuple[tuple[int, tuple[int, ...], bool], ...]
    """The fields of a SequenceProgress for each sequence with tokens."""
    num_cached_tokens: int
    is_last: bool
    """Whether all sequences have ended and the usage was sent."""
    has_failed: bool
    """Whether the message reports an error of the engine, which another replica does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Data that makes a call the same in any replica, and its progress so far."""

    call_id: str
    """The id of the call if its client gave none."""
    seed: int
    """The seed of the call if its client gave none."""
    created_s: int
    """When the call arrived, in seconds since 1970."""
    age_s: float = 0.0
    """The time since then when this was made, by the monotonic clock of the caller."""
    cause: Cause | None = None
    """Why the call does not run where it began; None at first."""
    replica: str = ""
    """The replica of the response that the client has the beginning of; empty at first."""
    num_cached_tokens: int = 0
    """The prompt tokens found in the prefix cache when it began."""
    sequences: tuple[SequenceProgress, ...] = ()
    """All sequences of the call in order, with all their tokens; empty if there are no tokens."""
    num_events: int = 0
    """Events that the client has received, over HTTP; some APIs number them."""

    def secret(self, purpose: str) -> str:
        """Return 32 hexadecimal digits that are the same in any replica and unknown to clients."""
        given = f"{purpose}\0{self.call_id}\0{self.seed}"
        return hashlib.blake2b(given.encode(), digest_size=16).hexdigest()

    def seed_of(self, prompt_index: int) -> int:
        """Return the seed of a prompt; equal prompts of a call have different seeds."""
        return (self.seed + prompt_index) % _SEEDS

    def generated_token_ids(self, prompt_index: int, n: int) -> tuple[tuple[int, ...] | None, ...]:
        """Return the tokens of each sequence of a prompt, None for an ended sequence."""
        begin = prompt_index * n
        return tuple(
            None if one.is_finished else one.token_ids for one in self.sequences[begin : begin + n]
        )
