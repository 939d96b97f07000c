"""The scheduler's record of one continuation, and of the request it belongs to."""

from enum import Enum, auto

from cluster.scheduling.fair_queue import Share
from cluster.scheduling.prefix_cache import BlockKey
from pagedray.request import Matcher, Request

__all__ = ["ActiveRequest", "Sequence", "SequenceState"]


class SequenceState(Enum):
    """Where a sequence is, which says what it holds."""

    HELD = auto()
    """Waits for the prompt that its sibling computes; holds nothing."""
    WAITING = auto()
    """Waits for a row and blocks; holds nothing."""
    RUNNING = auto()
    """Has a row and device blocks."""
    SWAPPED = auto()
    """Has CPU blocks."""
    ARRIVING = auto()
    """Has a row and device blocks that are still being filled from the CPU pool."""
    FINISHED = auto()


class ActiveRequest:
    """A request of which at least one sequence has not ended."""

    __slots__ = (
        "held",
        "is_queued",
        "num_cached_tokens",
        "num_unfinished",
        "request",
        "sequences",
        "share",
        "started_s",
        "stop_token_ids",
        "token_cost",
    )

    def __init__(self, request: Request, *, arrival: int, max_model_len: int) -> None:
        sampling = request.sampling
        eos_token_ids = () if sampling.ignore_eos else request.eos_token_ids
        self.request = request
        self.stop_token_ids = frozenset((*eos_token_ids, *sampling.stop_token_ids))
        self.share = Share[Sequence](request.tenant)
        """Its tenant's; of its own until it joins a queue."""
        self.token_cost = 1.0 / request.weight
        """What a token adds to its tenant's clock."""
        self.is_queued = True
        """Whether none of its sequences has started."""
        self.started_s = 0.0
        """When the first of its sequences was first planned; 0 before."""
        self.num_cached_tokens = 0
        self.num_unfinished = sampling.n
        self.sequences = [
            Sequence(self, index, arrival=arrival, max_model_len=max_model_len)
            for index in range(sampling.n)
        ]
        self.held = self.sequences[1:]
        """Sequences that wait for the prompt of the first one."""


class Sequence:
    """One continuation of a request.

    The planner, the sequence_table and the scheduler change the fields of the second group; those
    of the third are the KV manager's.
    """

    __slots__ = (
        "active",
        "block_ids",
        "cpu_block_ids",
        "index",
        "is_prefill",
        "keys",
        "length",
        "matcher",
        "max_length",
        "min_length",
        "next_full",
        "num_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_registered",
        "num_slots",
        "order",
        "prompt_step",
        "ready_step",
        "request_id",
        "reserved_block_ids",
        "row",
        "state",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self, active: ActiveRequest, index: int, *, arrival: int, max_model_len: int
    ) -> None:
        request = active.request
        sampling = request.sampling
        num_prompt_tokens = len(request.prompt_token_ids)
        self.active = active
        self.request_id = request.id
        self.index = index
        self.order = (request.priority, arrival, index)
        """Who is served first, and whose blocks are taken last: the lower."""
        self.stop_token_ids = active.stop_token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self.min_length = num_prompt_tokens + sampling.min_tokens
        """Tokens that come before the first token that may end the sequence."""
        self.max_length = min(num_prompt_tokens + sampling.max_tokens, max_model_len)
        """Tokens at which the sequence ends."""

        self.state = SequenceState.HELD if index else SequenceState.WAITING
        self.row = -1
        self.token_ids = list(request.prompt_token_ids)
        """All tokens known."""
        self.length = num_prompt_tokens
        """All tokens known or being sampled."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache once the plans in flight are done."""
        self.is_prefill = True
        """Whether tokens before the next sample are still to be computed."""
        self.prompt_step: int | None = None
        """The step that completed the prompt in the blocks at hand."""
        self.ready_step = -1
        """The step that must be acknowledged before the sequence moves on."""
        self.num_preemptions = 0
        self.matcher: Matcher | None = None
        """Where it is in its request's grammar, once its first token was to be sampled."""

        self.block_ids: list[int] = []
        """The block table, as the worker knows it."""
        self.num_slots = 0
        """Tokens that the block table has room for."""
        self.reserved_block_ids: list[int] = []
        """Blocks owned ahead of use; the last is used first."""
        self.cpu_block_ids: list[int] = []
        self.keys = list[BlockKey]()
        """What the leading full blocks hold, as far as it was hashed."""
        self.num_registered = 0
        """Leading blocks that were offered to the prefix cache."""
        self.next_full = 0
        """Tokens at which the next block can be offered."""

    def may_end_with(self, token_id: int) -> bool:
        """Whether the last token, which is this one, may end the sequence."""
        if token_id not in self.stop_token_ids:
            return False
        request = self.active.request
        # A mask allows an end-of-sequence token before `min_tokens` only where nothing else may
        # follow; then there is no way to go on.
        is_told_by_mask = request.grammar is not None and token_id in request.eos_token_ids
        return len(self.token_ids) > self.min_length or is_told_by_mask

    @property
    def share(self) -> "Share[Sequence]":
        """The share of its tenant."""
        return self.active.share

    @property
    def num_pending(self) -> int:
        """Tokens that are being sampled."""
        return self.length - len(self.token_ids)

    def forget_computed(self) -> None:
        """Make all known tokens tokens to compute."""
        self.num_computed = 0
        self.is_prefill = True
        self.prompt_step = None
