"""The scheduler's state of a sequence and of its request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.fair_queue import Share
from cluster.scheduling.sequence_blocks import SequenceBlocks
from pagedray.batch import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.device_tier import BlockKey
    from pagedray.request import Matcher, Request

__all__ = [
    "FINISHED",
    "ActiveRequest",
    "Arriving",
    "DiskRead",
    "FailedAdmission",
    "Finished",
    "ForcedTokens",
    "Held",
    "Placed",
    "Quarantined",
    "Queued",
    "Running",
    "Sequence",
    "SequenceDrafts",
    "SequenceMasks",
    "SequenceState",
    "Swapped",
    "Waiting",
]

_NUM_DEFERRED = 8
"""Tokens of a sequence without waits for their masks, after a late or costly mask."""
_MAX_UNVERIFIED = 8
"""Registered blocks of a running sequence that need not be verified yet, which costs time."""


class SequenceState:
    """The state of a sequence: a new object at each transition, with what only that state has."""

    __slots__ = ()
    row: int
    """The row of a placed sequence; other states have none."""
    starved_since: int | None = None
    """Starts of sequences when the sequence first found no room in this state."""


class Held(SequenceState):
    """Waits for the prompt of its sibling; holds nothing."""


class Quarantined(SequenceState):
    """May not run at present; holds nothing."""


class Finished(SequenceState):
    """Has ended; holds nothing."""


FINISHED = Finished()
"""The state of every finished sequence, which the output reader compares with each token."""


@dataclass(slots=True, eq=False)
class Queued(SequenceState):
    """Needs a row and device blocks."""

    starved_since: int | None = None
    failure: FailedAdmission | None = None
    """The failure at its last attempt to start."""


@dataclass(slots=True, eq=False)
class Waiting(Queued):
    """Holds nothing."""

    num_state_waits: int = 0
    """Steps for which the sequence waited for a snapshot of another sequence."""
    disk_read: DiskRead | None = None
    """The result of the only look-up on the disk; None before it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Swapped(Queued):
    """Has CPU blocks."""

    cpu_ids: list[int]
    """The rest of its block table, with CPU blocks."""
    num_unswapped: int
    """Entries before these that were not swapped out, since others shared their blocks."""
    ready_step: int
    """The step that fills the CPU blocks."""
    state_ids: list[int] = field(default_factory=list)
    """CPU blocks with its recurrent state."""


@dataclass(slots=True, eq=False)
class Placed(SequenceState):
    """Has a row and device blocks."""

    row: int
    start_number: int
    """Starts of sequences up to its own."""


@dataclass(slots=True, eq=False)
class Running(Placed):
    """Has its tokens in its blocks."""


@dataclass(slots=True, eq=False)
class Arriving(Placed):
    """Has blocks that copies from the CPU pool have not filled yet."""

    ready_step: int
    """The step with the copies."""


class ActiveRequest:
    """A request with at least one unfinished sequence."""

    __slots__ = (
        "held",
        "is_quarantined",
        "is_queued",
        "num_cached_tokens",
        "num_unfinished",
        "prompt",
        "prompt_logprobs",
        "request",
        "sequences",
        "started_s",
        "stop_token_ids",
        "token_cost",
    )

    def __init__(
        self, request: Request, *, prompt: array[int], arrival: int, max_model_len: int
    ) -> None:
        """`prompt` are the tokens of the request's prompt, uint32."""
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else request.eos_token_ids
        self.request = request
        self.prompt = prompt
        """The tokens of the prompt, which sequences share until they start."""
        self.stop_token_ids = frozenset((*eos_token_ids, *sampling.stop_token_ids))
        self.token_cost = 1.0 / request.weight
        """Cost of a token on the tenant's clock."""
        self.is_quarantined = False
        """Whether none of its sequences may run at present."""
        self.is_queued = True
        """Whether none of its sequences has started."""
        self.started_s = 0.0
        """When the first sequence of the request was first planned; 0 before."""
        self.num_cached_tokens = 0
        has_prompt_logprobs = sampling.prompt_logprobs is not None and 0 in request.open_indices
        self.prompt_logprobs = list[PromptLogprobs]() if has_prompt_logprobs else None
        """Log-probabilities of the prompt until its first token is sampled; None if not needed."""
        self.sequences = [
            Sequence(self, index, arrival=arrival, max_model_len=max_model_len)
            for index in request.open_indices
        ]
        self.num_unfinished = len(self.sequences)
        self.held = [one for one in self.sequences if isinstance(one.state, Held)]
        """Sequences that wait for the prompt of the first sequence."""


class Sequence:
    """One completion of a request.

    The sequence table changes its state, the planner and the scheduler its second group of fields.
    """

    __slots__ = (
        "active",
        "blocks",
        "drafts",
        "index",
        "is_prefill",
        "masks",
        "max_length",
        "min_length",
        "num_charged",
        "num_computed",
        "num_initial_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "prefill_end",
        "prompt_step",
        "recheck_at",
        "request_id",
        "share",
        "state",
        "stop_token_ids",
        "token_ids",
        "unchecked_until",
    )

    def __init__(
        self, active: ActiveRequest, index: int, *, arrival: int, max_model_len: int
    ) -> None:
        request = active.request
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        continued = request.generated_token_ids
        generated = continued[index] or () if continued else ()
        self.active = active
        self.request_id = request.id
        self.index = index
        self.order = (request.priority, arrival, index)
        """Lower orders are served first and preempted last."""
        self.stop_token_ids = active.stop_token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.min_length = num_prompt_tokens + sampling.min_tokens
        """Tokens before the first token that may end the sequence."""
        self.max_length = min(num_prompt_tokens + sampling.max_tokens, max_model_len)
        """Number of tokens at which the sequence ends."""

        # Sequences that continue have tokens of their own to compute.
        is_held = index > 0 and not continued
        self.state: SequenceState = Held() if is_held else Waiting()
        self.share = Share[Sequence](request.tenant)
        """The share of its tenant, once the request is queued."""
        self.token_ids = active.prompt
        """All tokens known, uint32; the request's array as long as there are no others."""
        if generated:
            self.own_tokens()
            self.token_ids.extend(generated)
        self.num_computed = 0
        """Tokens that are in the cache once the plans in flight are done, if all of their drafts
        are right; only overlapped plans are made before that is known."""
        self.is_prefill = True
        """Whether known tokens remain to be computed before the next sample."""
        self.prefill_end = len(self.token_ids)
        """The number of tokens that its prefill computes; some may still be being sampled."""
        self.unchecked_until = 0
        """While `num_computed` is less, its next token is planned without examining its state; 0
        if that is not known."""
        self.prompt_step: int | None = None
        """The step that completed the prompt in the current blocks."""
        self.num_preemptions = 0
        self.num_initial_tokens = len(self.token_ids)
        """Tokens that it came with."""
        self.num_charged = 0
        """Tokens of these that its tenant has been charged for, or that were cached."""
        mask_start = active.request.mask_start
        self.masks = None if mask_start is None else SequenceMasks(mask_start)
        """None if it samples without masks from its next token on."""
        self.drafts: SequenceDrafts | None = None
        """None if it has no drafts."""

        self.blocks = SequenceBlocks()
        """Changed by the KV manager, like `recheck_at`."""
        self.recheck_at = 0
        """Number of tokens at which it ends or the next block can be registered; 0 while many are
        unverified."""

    def own_tokens(self) -> None:
        """Get a copy of the prompt, to which tokens may be appended."""
        if self.token_ids is self.active.prompt:
            self.token_ids = self.active.prompt[:]

    def hold_blocks(
        self,
        ids: AnySequence[int],
        reserved_ids: list[int],
        *,
        block_size: int,
        num_groups: int,
        num_registered: int | None,
        num_verified: int,
    ) -> None:
        """Begin a block table; the prefix cache has its first blocks, some of them verified.

        `num_registered` is None without a prefix cache.
        """
        self.own_tokens()
        blocks = self.blocks
        blocks.ids = array("i", ids)
        blocks.num_slots = len(ids) // num_groups * block_size
        blocks.reserved_ids = reserved_ids
        blocks.num_verified = num_verified
        if num_registered is None:
            self.recheck_at = self.max_length
        else:
            self.note_registered(num_registered, block_size)

    def note_registered(self, num_blocks: int, block_size: int) -> None:
        """Record that the prefix cache has the first blocks, and no others."""
        self.blocks.num_registered = num_blocks
        if num_blocks - self.blocks.num_verified > _MAX_UNVERIFIED:
            # The next token verifies some.
            self.recheck_at = 0
        else:
            next_full, max_length = (num_blocks + 1) * block_size, self.max_length
            self.recheck_at = next_full if next_full < max_length else max_length

    def drop_blocks(self) -> None:
        """Forget the block table; the keys of the tokens stay."""
        self.blocks.clear()
        self.unchecked_until = 0

    def find_donor(self, step: int, num_dead: AnySequence[int] = ()) -> Sequence | None:
        """Return a sibling with the prompt in its blocks since before `step`, or None.

        Of each group, it has all blocks but the first `num_dead`.
        """
        if self.index == 0 or len(self.token_ids) > self.num_prompt_tokens:
            return None
        for sibling in self.active.sequences:
            prompt_step = sibling.prompt_step
            is_running = isinstance(sibling.state, Running)
            if not is_running or prompt_step is None or prompt_step >= step:
                continue
            if all(map(le, sibling.blocks.num_dead, num_dead)):
                return sibling
        return None

    @property
    def is_masked(self) -> bool:
        """Whether the token that its last plan samples is masked."""
        if self.masks is None:
            return False
        return self.num_computed >= self.num_prompt_tokens + self.masks.start

    def may_be_masked(self, *, num_tokens: int) -> bool:
        """Return whether any of the next tokens to be planned may be sampled under a mask."""
        if self.masks is None:
            return False
        first_masked = self.num_prompt_tokens + self.masks.start
        return self.masks.num_deferred > 0 or self.num_computed + num_tokens >= first_masked

    def may_end_with(self, token_id: int) -> bool:
        """Return whether `token_id`, the last token, may end the sequence."""
        if token_id not in self.stop_token_ids:
            return False
        request = self.active.request
        # A mask allows an end-of-sequence token before `min_tokens` only if the grammar allows no
        # other token.
        is_end_of_grammar = request.grammar is not None and token_id in request.eos_token_ids
        return len(self.token_ids) > self.min_length or is_end_of_grammar

    @property
    def priority(self) -> int:
        """Lower priorities are served first."""
        return self.order[0]

    @property
    def length(self) -> int:
        """All tokens known or being sampled."""
        # After the prefill, a plan computes the last token.
        return self.prefill_end if self.is_prefill else self.num_computed + 1

    @property
    def is_ending(self) -> bool:
        """Whether the last token is being sampled; the sequence then frees its blocks anyway."""
        return self.num_computed == self.max_length - 1

    @property
    def num_pending(self) -> int:
        """Tokens that are being sampled."""
        return self.length - len(self.token_ids)

    @property
    def has_sampled(self) -> bool:
        """Whether a token was sampled from the current blocks."""
        return not self.is_prefill and len(self.token_ids) > self.prefill_end

    @property
    def is_deferred(self) -> bool:
        """Whether its tokens are planned only once their masks are made."""
        masks = self.masks
        if masks is None or self.state is FINISHED:
            return False
        return masks.num_deferred > 0

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask of its next token must be made before that token is planned."""
        masks = self.masks
        if masks is None or masks.is_awaited:
            return False
        return self.length >= self.num_prompt_tokens + masks.start

    @property
    def awaits_mask(self) -> bool:
        """Whether the sequence must not start before the mask of the next token is made."""
        return self.masks is not None and self.masks.is_strict and self.lacks_mask

    @property
    def waits_for_mask(self) -> bool:
        """Whether the mask of its next token, which no plan samples, is to be made."""
        return self.is_deferred and self.lacks_mask and not self.num_pending

    def refuse_drafts(self, number: int) -> None:
        """Take back the last tokens that were planned, which follow a wrong draft."""
        if self.is_prefill:
            # It has lost its blocks meanwhile.
            self.prefill_end -= number
        else:
            self.num_computed -= number

    def forget_computed(self) -> None:
        """Mark all known tokens as not computed."""
        self.prefill_end = self.length
        self.num_computed = 0
        self.is_prefill = True
        self.prompt_step = None


class SequenceMasks:
    """When a sequence needs masks, and whether steps wait for them."""

    __slots__ = ("forced", "is_made", "is_strict", "matcher", "num_deferred", "start")

    def __init__(self, start: int) -> None:
        self.forced: ForcedTokens | None = None
        """The last tokens that the grammar forced."""
        self.is_strict = False
        """Whether no token may be computed twice, so that every token waits for its mask."""
        self.start = start
        """Number of generated tokens after which the sequence samples under masks."""
        self.matcher: Matcher | None = None
        """The state of the sequence in the grammar, from its first mask on."""
        self.num_deferred = 0
        """Tokens that are planned only once their masks are made, since its masks were late."""
        self.is_made = False
        """Whether the mask of the next token is made, if that token is deferred."""

    def forced_ids(self, token_ids: array[int]) -> AnySequence[int]:
        """Return the only tokens that the grammar lets follow the sequence, if there are any."""
        if self.forced is None:
            return ()
        place, forced_ids = self.forced
        known_ids = token_ids[place:].tolist()
        is_followed = len(token_ids) >= place and known_ids == forced_ids[: len(known_ids)]
        return forced_ids[len(known_ids) :] if is_followed else ()

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for the mask of the next token, or has it."""
        return not self.num_deferred or self.is_made

    def defer_all(self) -> None:
        """Let every token wait for its mask."""
        self.is_strict, self.num_deferred = True, 1

    def note_made(self, *, is_late: bool) -> None:
        """Note a mask; after a late mask, no step waits for the next masks."""
        if is_late:
            self.num_deferred = _NUM_DEFERRED
        elif self.num_deferred and not self.is_strict:
            self.num_deferred -= 1


class ForcedTokens(NamedTuple):
    """Tokens of a sequence that most likely follow, since its grammar allows no other text."""

    place: int
    """The number of tokens before them."""
    token_ids: list[int]


class SequenceDrafts:
    """How well the drafts of a sequence have been guessed."""

    __slots__ = (
        "_guess",
        "_num_misses",
        "feeding",
        "head_ids",
        "lead",
        "num_followed",
        "num_known",
        "paused_until",
        "place",
    )

    def __init__(self) -> None:
        self.lead = 0.0
        """How much more often its drafts are right than the drafts of all sequences."""
        self._guess = (0, 0)
        """The index of a token that was not known when it was guessed, and the guess."""
        self._num_misses = 0
        """Guesses in a row that were wrong or not made."""
        self.paused_until = 0
        """The number of tokens up to which no more guesses are made."""
        self.place = 0
        """The index in the prediction of the request of the token that is guessed next."""
        self.num_followed = 0
        """Generated tokens up to which the prediction was followed."""
        self.head_ids: AnySequence[int] = ()
        """The latest guesses of a draft head."""
        self.num_known = 0
        """The number of tokens before these guesses."""
        self.feeding: int | None = None
        """The number of the feeding in which a draft head reads its tokens; None before its first
        tokens, and -1 if a draft head has not read them all."""

    def note_miss(self, num_tokens: int, most: int) -> None:
        """Pause guesses, which take time, for a token more after each miss in a row."""
        self._num_misses += 1
        self.paused_until = num_tokens + min(self._num_misses, most)

    def note_hit(self) -> None:
        """Note that guesses are right again."""
        self._num_misses = 0

    def note_guess(self, index: int, token_id: int) -> None:
        """Remember a guess of a token that is being sampled."""
        self._guess = index, token_id

    def take_guess(self, token_ids: AnySequence[int]) -> bool | None:
        """Return whether the last guess was right, once; None if that is not known."""
        index, token_id = self._guess
        if not index or index >= len(token_ids):
            return None
        self._guess = 0, 0
        return token_ids[index] == token_id


class FailedAdmission(NamedTuple):
    """The state of the prefix cache when a sharing sequence found too few free blocks."""

    next_key: BlockKey | None
    """Key of the first block that was not cached; None if every shareable block was cached."""
    num_shared: int
    """Cached blocks that need no free block, since they were not idle."""
    num_changes: int
    """Count of pool changes that may free a shared block."""
    revision: int
    """The revision of the prefix cache."""
    num_more: int = 0
    """The most blocks by which `num_shared` may grow without such changes, in several groups."""


class DiskRead(NamedTuple):
    """The look-up of a waiting sequence's blocks on the disk."""

    step: int | None
    """The step that reads blocks that the sequence waits for, if any."""
