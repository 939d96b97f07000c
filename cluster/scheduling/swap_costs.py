"""The costs of copying blocks and of recomputing them, by the durations that ranks report.

Blocks stand for bytes, since all have the same size.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.scheduling.step_times import StepPace, StepTimes
    from pagedray.batch import StepOutput, StepPlan

__all__ = ["CostMeter", "SwapCosts", "TierPolicy"]

_KEPT = 0.8
"""Weight of a measurement relative to the next measurement."""
_MAX_UNMEASURED = 16
"""Choices against swapping after which it is tried again."""
_STEPS_PER_MEASUREMENT = 32
"""Steps without prompts are similar: of this many, a single step is measured."""

_SAVED_ANYWAY = 64
"""Every so many blocks, a block is copied even without a gain, so that copies are measured."""
_FIRST_WEIGHT = 512
"""Blocks that count as evicted and found again before any was."""
_MOST_WEIGHT = 8192
"""Evicted blocks after which older blocks count half."""


class SwapCosts:
    """Chooses between copying blocks and computing their tokens."""

    __slots__ = ("_num_unmeasured", "_num_unread", "_read", "_step_times", "_swap")

    def __init__(self, step_times: StepTimes) -> None:
        self._swap = _MovingRate()
        self._read = _MovingRate()
        self._step_times = step_times
        self._num_unmeasured = self._num_unread = 0

    @property
    def is_measured(self) -> bool:
        """Whether copies and steps were measured."""
        return self._swap.per_s > 0.0 and self._step_times.is_measured

    def note_swaps(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of copying blocks between the pools, in either direction."""
        self._num_unmeasured = 0
        self._swap.add(num_blocks, seconds)

    def note_reads(self, num_blocks: int, seconds: float) -> None:
        """Record the duration of reading blocks from the disk."""
        self._num_unread = 0
        self._read.add(num_blocks, seconds)

    def choose_swap(self, *, num_blocks: int, first_position: int, num_tokens: int) -> bool:
        """Return whether to swap blocks out and in, rather than recompute the tokens.

        Tokens before `first_position` are in blocks that are shared, and found again either way.
        """
        # Swapping is tried if there is no recent measurement: one slow copy must not rule it out.
        if not self.is_measured:
            return True
        if self._num_unmeasured >= _MAX_UNMEASURED:
            self._num_unmeasured = 0
            return True
        is_swap = 2 * num_blocks / self._swap.per_s < self._recompute_s(first_position, num_tokens)
        self._num_unmeasured += not is_swap
        return is_swap

    def choose_restore(self, *, num_blocks: int, first_position: int, num_tokens: int) -> bool:
        """Return whether to copy cached blocks to the device, rather than compute their tokens.

        A sequence waits a step for the copies.
        """
        if not self.is_measured:
            return True
        restore_s = num_blocks / self._swap.per_s + self._step_times.step_s(
            num_tokens=0, num_pairs=0
        )
        return restore_s < self._recompute_s(first_position, num_tokens)

    def choose_read(
        self, *, num_blocks: int, num_reading: int, first_position: int, num_tokens: int
    ) -> bool:
        """Return whether to read cached blocks from the disk, rather than compute their tokens.

        They wait for `num_reading` others, and are copied to the device afterwards.
        """
        if not (self.is_measured and self._read.per_s):
            return True
        if self._num_unread >= _MAX_UNMEASURED:
            self._num_unread = 0
            return True
        read_s = (num_blocks + num_reading) / self._read.per_s
        restore_s = num_blocks / self._swap.per_s + self._step_times.step_s(
            num_tokens=0, num_pairs=0
        )
        is_read = read_s + restore_s < self._recompute_s(first_position, num_tokens)
        self._num_unread += not is_read
        return is_read

    def pays(self, *, num_copied: float, num_found: float, num_tokens: int) -> bool:
        """Return whether copying blocks out saves time if this many of them are found again.

        A block has `num_tokens`. Their attention is not counted in its favor.
        """
        if not self.is_measured:
            return True
        copy_s = 1.0 / self._swap.per_s
        saved_s = self._step_times.marginal_s(num_tokens=num_tokens, num_pairs=0) - copy_s
        return num_found * saved_s > num_copied * copy_s

    def _recompute_s(self, first_position: int, num_tokens: int) -> float:
        num_pairs = num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
        return self._step_times.marginal_s(num_tokens=num_tokens, num_pairs=num_pairs)


class _MovingRate:
    """An exponentially weighted rate per second."""

    __slots__ = ("_amount", "_seconds")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """The rate, or 0 without a measurement."""
        return self._amount / self._seconds if self._seconds else 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0.0:
            self._amount = _KEPT * self._amount + amount
            self._seconds = _KEPT * self._seconds + seconds


class CostMeter:
    """Records durations, from which costs are computed."""

    __slots__ = ("_pace", "_step_times", "_swap_costs")

    def __init__(self, step_times: StepTimes, swap_costs: SwapCosts, pace: StepPace | None) -> None:
        self._step_times = step_times
        self._swap_costs = swap_costs
        self._pace = pace

    def note_output(self, plan: StepPlan, output: StepOutput) -> None:
        """Note how long the copies and tokens of a plan took."""
        if output.num_swapped:
            self._swap_costs.note_swaps(output.num_swapped, output.swap_s)
        # Sequences of several tokens come first.
        has_prompt = plan.chunks and plan.chunks[0].num_tokens > 1
        if not output.forward_s or not (has_prompt or plan.step % _STEPS_PER_MEASUREMENT == 0):
            return
        num_tokens = plan.num_tokens
        num_pairs = plan.decodes.num_pairs + sum(chunk.num_pairs for chunk in plan.chunks)
        if self._pace is not None and has_prompt:
            self._pace.note_step(
                num_tokens=num_tokens,
                num_pairs=num_pairs,
                num_prompt_tokens=sum(one.num_tokens for one in plan.chunks if one.num_tokens > 1),
                seconds=output.forward_s,
            )
        self._step_times.note_step(
            num_tokens=num_tokens, num_pairs=num_pairs, seconds=output.forward_s
        )


class TierPolicy:
    """Compares the time of copies with the time that they save."""

    __slots__ = (
        "_block_size",
        "_costs",
        "_lost",
        "_num_blocks",
        "_num_evicted",
        "_num_found",
        "_num_until_check",
        "is_open",
    )

    def __init__(self, costs: SwapCosts | None, *, num_blocks: int, block_size: int) -> None:
        """Without costs, every copy is worth it; the CPU pool has `num_blocks`."""
        self._costs = costs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_evicted = self._num_found = float(_FIRST_WEIGHT)
        """Number of recently evicted blocks. At first, as many count as found as were evicted."""
        self._lost: OrderedDict[bytes, None] = OrderedDict()
        """Digests of blocks that were evicted and not copied."""
        self.is_open = True
        """Whether evicted blocks are copied."""
        self._num_until_check = _SAVED_ANYWAY

    def is_saved(self, digest: bytes) -> bool:
        """Return whether to copy an evicted block to the CPU pool."""
        if self._costs is None:
            return True
        self._num_evicted += 1.0
        self._num_until_check -= 1
        if not self._num_until_check:
            self._num_until_check = _SAVED_ANYWAY
            self._check(self._costs)
            return True
        if not self.is_open:
            self.note_lost(digest)
        return self.is_open

    def note_lost(self, digest: bytes) -> None:
        """Remember a block that was evicted and not copied."""
        self._lost[digest] = None
        if len(self._lost) > self._num_blocks:
            self._lost.popitem(last=False)

    def note_lookup(self, digest: bytes) -> bool:
        """Return whether a block that was looked up would have been found, had it been copied."""
        if digest not in self._lost:
            return False
        del self._lost[digest]
        self._num_found += 1.0
        return True

    def is_restored(self, num_blocks: int, *, first: int) -> bool:
        """Return whether to copy found blocks back rather than compute them, from `first` on."""
        if self._costs is not None and not self._costs.choose_restore(
            num_blocks=num_blocks,
            first_position=first * self._block_size,
            num_tokens=num_blocks * self._block_size,
        ):
            return False
        self._num_found += num_blocks
        return True

    def is_read(self, num_blocks: int, *, num_reading: int, first: int) -> bool:
        """Return whether to read blocks from the disk rather than compute them, from `first` on.

        They wait for `num_reading` others.
        """
        return self._costs is None or self._costs.choose_read(
            num_blocks=num_blocks,
            num_reading=num_reading,
            first_position=first * self._block_size,
            num_tokens=num_blocks * self._block_size,
        )

    def clear(self) -> None:
        """Forget all lost blocks: the blocks of new ranks are empty."""
        self._lost.clear()

    def _check(self, costs: SwapCosts) -> None:
        """Compare the cost of recent evictions with the savings."""
        self.is_open = costs.pays(
            num_copied=self._num_evicted, num_found=self._num_found, num_tokens=self._block_size
        )
        if self._num_evicted > _MOST_WEIGHT:
            self._num_evicted /= 2
            self._num_found /= 2
