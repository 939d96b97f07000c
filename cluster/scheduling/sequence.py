"""The scheduler's state of a sequence and of its request."""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.fair_queue import Share
from cluster.scheduling.prefix_cache import BlockKey
from pagedray.batch import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedray.request import Matcher, Request

__all__ = ["ActiveRequest", "FailedAdmission", "Sequence", "SequenceMasks", "SequenceState"]

_NUM_DEFERRED = 8
"""Tokens of a sequence without waits for their masks, after a late or costly mask."""


class SequenceState(Enum):
    """The state of a sequence, which determines its rows and blocks."""

    HELD = auto()
    """Waits for the prompt of its sibling; holds nothing."""
    WAITING = auto()
    """Waits for a row and blocks; holds nothing."""
    RUNNING = auto()
    """Has a row and device blocks."""
    SWAPPED = auto()
    """Has CPU blocks."""
    ARRIVING = auto()
    """Has a row and device blocks that are being swapped in."""
    QUARANTINED = auto()
    """May not run at present; holds nothing."""
    FINISHED = auto()


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
        "share",
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
        self.share = Share[Sequence](request.tenant)
        """The share of the tenant, once the request is queued."""
        self.token_cost = 1.0 / request.weight
        """Cost of a token on the tenant's clock."""
        self.is_quarantined = False
        """Whether none of its sequences may run at present."""
        self.is_queued = True
        """Whether none of its sequences has started."""
        self.started_s = 0.0
        """When the first sequence of the request was first planned; 0 before."""
        self.num_cached_tokens = 0
        is_described = sampling.prompt_logprobs is not None and 0 in request.open_indices
        self.prompt_logprobs = list[PromptLogprobs]() if is_described else None
        """Log-probabilities of the prompt until its first token is sampled; None if not needed."""
        self.sequences = [
            Sequence(self, index, arrival=arrival, max_model_len=max_model_len)
            for index in request.open_indices
        ]
        self.num_unfinished = len(self.sequences)
        self.held = [one for one in self.sequences if one.state is SequenceState.HELD]
        """Sequences that wait for the prompt of the first sequence."""


class Sequence:
    """One completion of a request.

    The planner, the sequence table and the scheduler change its second group of fields.
    """

    __slots__ = (
        "active",
        "blocks",
        "donor_row",
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
        "ready_step",
        "recheck_at",
        "request_id",
        "row",
        "start_number",
        "starved_since",
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
        self.state = SequenceState.HELD if is_held else SequenceState.WAITING
        self.row = -1
        self.donor_row = -1
        """The row of the sibling that it was forked from, until it starts; -1 is none."""
        self.token_ids = active.prompt
        """All tokens known, uint32; the request's array as long as there are no others."""
        if generated:
            self.own_tokens()
            self.token_ids.extend(generated)
        self.num_computed = 0
        """Tokens that are in the cache once the plans in flight are done."""
        self.is_prefill = True
        """Whether known tokens remain to be computed before the next sample."""
        self.prefill_end = len(self.token_ids)
        """The number of tokens that its prefill computes; some may still be being sampled."""
        self.unchecked_until = 0
        """While `num_computed` is less, its next token is planned without examining its state; 0
        if that is not known."""
        self.prompt_step: int | None = None
        """The step that completed the prompt in the current blocks."""
        self.ready_step = -1
        """The step with copies that must be acknowledged before the next transition."""
        self.num_preemptions = 0
        self.start_number = 0
        """Starts of sequences up to its own."""
        self.starved_since = -1
        """Starts of sequences when it first found no room; -1 if it has not, or has run since."""
        self.num_initial_tokens = len(self.token_ids)
        """Tokens that it came with."""
        self.num_charged = 0
        """Tokens of these that its tenant has been charged for, or that were cached."""
        mask_start = active.request.mask_start
        self.masks = None if mask_start is None else SequenceMasks(mask_start)
        """None if it samples without masks from its next token on."""

        self.blocks = SequenceBlocks()
        """Changed by the KV manager, like `recheck_at`."""
        self.recheck_at = 0
        """Number of tokens at which it ends or the next block can be registered; 0 while many are
        unverified."""

    def own_tokens(self) -> None:
        """Get a copy of the prompt, to which tokens may be appended."""
        if self.token_ids is self.active.prompt:
            self.token_ids = self.active.prompt[:]

    @property
    def is_masked(self) -> bool:
        """Whether the token that its last plan samples is masked."""
        if self.masks is None:
            return False
        return self.num_computed >= self.num_prompt_tokens + self.masks.start

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
    def share(self) -> Share[Sequence]:
        """The share of its tenant."""
        return self.active.share

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
        if masks is None or self.state is SequenceState.FINISHED:
            return False
        return masks.num_deferred > 0

    @property
    def lacks_mask(self) -> bool:
        """Whether the mask of its next token must be made before that token is planned."""
        return self.masks is not None and not self.masks.is_awaited

    @property
    def waits_for_mask(self) -> bool:
        """Whether the mask of its next token, which no plan samples, is to be made."""
        return self.is_deferred and self.lacks_mask and not self.num_pending

    def forget_computed(self) -> None:
        """Mark all known tokens as not computed."""
        self.prefill_end = self.length
        self.num_computed = 0
        self.is_prefill = True
        self.prompt_step = None


class SequenceMasks:
    """When a sequence needs masks, and whether steps wait for them."""

    __slots__ = ("is_made", "matcher", "num_deferred", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        """Number of generated tokens after which the sequence samples under masks."""
        self.matcher: Matcher | None = None
        """The state of the sequence in the grammar, from its first mask on."""
        self.num_deferred = 0
        """Tokens that are planned only once their masks are made, since its masks were late."""
        self.is_made = False
        """Whether the mask of the next token is made, if that token is deferred."""

    @property
    def is_awaited(self) -> bool:
        """Whether a step waits for the mask of the next token, or has it."""
        return not self.num_deferred or self.is_made

    def note_made(self, *, is_late: bool) -> None:
        """Note a mask; after a late mask, no step waits for the next masks."""
        if is_late:
            self.num_deferred = _NUM_DEFERRED
        elif self.num_deferred:
            self.num_deferred -= 1


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


class SequenceBlocks:
    """The blocks of a sequence in both pools."""

    __slots__ = (
        "awaits_copies",
        "cpu_ids",
        "disk_step",
        "failure",
        "ids",
        "keys",
        "keys_revision",
        "num_registered",
        "num_slots",
        "num_unswapped",
        "num_verified",
        "reserved_ids",
    )

    def __init__(self) -> None:
        self.keys = list[BlockKey]()
        """Keys of the leading full blocks, as far as hashed."""
        self.keys_revision = 0
        """The revision of the prefix cache when the first key was hashed."""
        self.num_registered = 0
        """Leading blocks that were registered with the prefix cache."""
        self.num_verified = 0
        """Leading blocks that gave finite logits."""
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the keys of their tokens stay."""
        self.ids = array("i")
        """The block table, as in the worker."""
        self.num_slots = 0
        """Capacity of the block table in tokens."""
        self.reserved_ids: list[int] = []
        """Blocks allocated in advance; the last is used first."""
        self.cpu_ids: list[int] = []
        self.awaits_copies = False
        """Whether some of its blocks are copied to the device when it starts."""
        self.disk_step: int | None = None
        """The step of the disk reads that it waits for, or -1; None if it needs a look-up."""
        self.num_unswapped = 0
        """Blocks before these that were not swapped out, since others shared them."""
        self.failure: FailedAdmission | None = None
        """The failure at its last attempt to start, if it has waited since then."""

    def hold(
        self, ids: Iterable[int], reserved_ids: list[int], block_size: int, *, num_verified: int
    ) -> None:
        """Begin the block table, the first `num_verified` blocks of which are verified."""
        self.ids = array("i", ids)
        self.num_slots = len(self.ids) * block_size
        self.reserved_ids = reserved_ids
        self.num_verified = num_verified

    def extend(self, num_blocks: int, block_size: int) -> list[int]:
        """Move reserved blocks to the block table, and return them."""
        reserved_ids = self.reserved_ids
        added = [reserved_ids.pop() for _ in range(num_blocks)]
        self.ids.extend(added)
        self.num_slots = len(self.ids) * block_size
        return added
