"""Requests, the grammars that constrain them, and their finish reasons."""

from __future__ import annotations

from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_WHITESPACE",
    "WHITESPACE",
    "AnswerHeader",
    "AskedMasks",
    "FinishReason",
    "Grammar",
    "Matcher",
    "Reasoning",
    "ReasoningPlace",
    "ReasoningTracker",
    "Request",
]

WHITESPACE = " \t\r\n"
MAX_WHITESPACE = 16
"""Maximum number of whitespace characters before the mark at which reasoning begins."""
_WHITESPACE_BYTES = WHITESPACE.encode()


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

    @property
    def forced_ids(self) -> Sequence[int]:
        """Tokens that most likely follow the tokens and drafts of the last masks.

        The structure allows no other text there.
        """


class AskedMasks(NamedTuple):
    """The masks to be made for a sequence: of its next token, and of the token after each draft."""

    matcher: Any  # Any: of the grammar's own kind.
    """What `Grammar.matcher` returned."""
    token_ids: Sequence[int]
    """All tokens of the sequence, the prompt included."""
    draft_ids: Sequence[int] = ()
    """Guesses of its next tokens."""
    num_forced: int = 0
    """The most tokens of `Matcher.forced_ids` that are of use."""


class Grammar(Protocol):
    """A compiled structure, shared by any number of sequences."""

    @property
    def num_mask_bytes(self) -> int:
        """Size of a mask in bytes."""

    def matcher(self, request: Request) -> Matcher:
        """Return a matcher for a new completion of the request."""

    def masks(
        self, asked: Sequence[AskedMasks], *, num_awaited: int, wait_s: float
    ) -> list[bytes | FinishReason | None]:
        """Return the masks of allowed tokens, or the finish reason if none is; never raises.

        It waits up to `wait_s` for the first `num_awaited` of them, and not for the others. A mask
        that is not made by then is None; a later call that asks for it again returns it.

        The mask of the next token is followed by the masks of the tokens after drafts, up to the
        first draft that is not allowed, or to the first mask that is not made by then.

        Matchers may belong to any grammar of the same model. Bit `i % 32` of int32 word `i // 32`
        of a mask is token `i`.
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
    anchors: tuple[int, ...] = ()
    """Lengths of the prompt that later prompts are likely to repeat, at which recurrent states are
    kept; empty is all of the prompt."""
    prediction: bytes = b""
    """Tokens that the client expects, as `pack_token_ids` returns them; they only affect speed."""
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


class AnswerHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of an answer, in models with turns of messages in channels."""

    token_ids: tuple[int, ...]
    text: str = ""
    """The beginning of the structure's text for which it stands, if it chooses among several."""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """How the reasoning of one request begins and ends."""

    begin: str
    """The text at which it begins; a turn that begins otherwise has none."""
    end: str
    """The text at which it ends."""
    mark_tokens: tuple[tuple[int, str], ...] = ()
    """Tokens that are a mark as a whole, or special in it, with their texts."""
    has_special_tokens: bool = False
    """Whether one of these is a special token, which texts usually leave out."""
    answer_headers: tuple[AnswerHeader, ...] = ()
    """Headers of which one follows `end`, in models with turns of messages in channels."""
    num_prompt_tokens: int = 0
    """The first tokens of each header, with which the prompt of such a model ends."""
    is_open: bool = False
    """Whether it begins in the prompt, so that the generated text needs no `begin`."""

    @property
    def has_channels(self) -> bool:
        """Whether turns are messages in channels."""
        return bool(self.answer_headers)


class ReasoningPlace(Enum):
    """How far a sequence has come in its reasoning."""

    START = auto()
    """Only whitespace and a part of `begin` so far: reasoning may begin or not."""
    INSIDE = auto()
    AFTER = auto()
    """The reasoning has ended."""
    ABSENT = auto()
    """The sequence began without reasoning."""


class ReasoningTracker:
    """Follows the tokens of one sequence through its reasoning."""

    def __init__(self, reasoning: Reasoning) -> None:
        self.place = ReasoningPlace.INSIDE if reasoning.is_open else ReasoningPlace.START
        self.rest = b""
        """The missing rest of the mark that comes next, `begin` or `end`, of which a part may be at
        the end of the tokens so far."""
        self.after = b""
        """The bytes after `end` of the token in which it ended."""
        self._begin, self._end = reasoning.begin.encode(), reasoning.end.encode()
        self._mark_tokens = {token_id: text.encode() for token_id, text in reasoning.mark_tokens}
        self._tail = b""
        self._set_rest()

    @property
    def is_passed(self) -> bool:
        """Whether no more reasoning follows."""
        return self.place in (ReasoningPlace.AFTER, ReasoningPlace.ABSENT)

    def add_token(self, token_id: int, token: bytes) -> None:
        """Add a token and its bytes, which may be empty for a special token."""
        if self.is_passed:
            return
        self._tail += self._mark_tokens.get(token_id, token)
        if self.place is ReasoningPlace.START:
            self._begin_or_not()
        if self.place is ReasoningPlace.INSIDE:
            _, found, after = self._tail.partition(self._end)
            if found:
                self.place, self.after, self._tail = ReasoningPlace.AFTER, after, b""
            else:
                self._tail = self._tail[max(0, len(self._tail) - len(self._end) + 1) :]
        self._set_rest()

    def _begin_or_not(self) -> None:
        begun = self._tail.lstrip(_WHITESPACE_BYTES)
        if begun.startswith(self._begin):
            self.place, self._tail = ReasoningPlace.INSIDE, begun[len(self._begin) :]
        elif not self._begin.startswith(begun) or len(self._tail) - len(begun) > MAX_WHITESPACE:
            self.place, self._tail = ReasoningPlace.ABSENT, b""

    def _set_rest(self) -> None:
        if self.place is ReasoningPlace.START:
            self.rest = self._begin[len(self._tail.lstrip(_WHITESPACE_BYTES)) :]
        elif self.place is ReasoningPlace.INSIDE:
            place = self._tail.find(self._end[:1])
            while place >= 0 and not self._end.startswith(self._tail[place:]):
                place = self._tail.find(self._end[:1], place + 1)
            self.rest = self._end if place < 0 else self._end[len(self._tail) - place :]
