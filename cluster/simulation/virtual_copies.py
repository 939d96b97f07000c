"""Copies between the pools in virtual time, while steps run.

They behave like `BlockSwaps`: a stream for each direction, which waits for the steps before, while
a step waits only for the evicted blocks that found no staging block. The end of a copy is known
when it begins.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.simulation.step_cost import StepCost
    from pagedray.batch import StepPlan

__all__ = ["VirtualCopies"]

_MAX_STAGING_BLOCKS = 512
"""1 GiB of blocks of Llama 8B with 16 tokens each."""
_MAX_STAGING_PART = 32
"""Staging blocks are at most this fraction of the device pool."""


class _Span(NamedTuple):
    """Copies on one stream."""

    num_blocks: int
    seconds: float
    ended_s: float


class VirtualCopies:
    """The two streams of a rank, and its staging blocks."""

    def __init__(self, cost: StepCost, *, num_blocks: int) -> None:
        """The device pool has `num_blocks`."""
        self._cost = cost
        self._num_staging = min(num_blocks // _MAX_STAGING_PART, _MAX_STAGING_BLOCKS)
        self._staged: deque[tuple[float, int]] = deque()
        """The times at which staging blocks become free again, and how many of them."""
        self._out_ended_s = self._in_ended_s = 0.0
        self._unmeasured: deque[_Span] = deque()

    @property
    def ended_s(self) -> float:
        """When all copies that were launched have ended."""
        return max(self._out_ended_s, self._in_ended_s)

    def launch(self, plan: StepPlan, *, now_s: float, steps_ended_s: float) -> float:
        """Launch the copies of a plan; return when its step may begin.

        The steps before it have ended at `steps_ended_s`, which may be later than `now_s`.
        """
        begins_s = steps_ended_s
        num_out = len(plan.evictions) + len(plan.swap_outs)
        if num_out:
            num_staged = self._stage(len(plan.evictions), now_s)
            num_unstaged = len(plan.evictions) - num_staged
            began_s = max(self._out_ended_s, steps_ended_s)
            # Blocks without a staging block are copied first.
            if num_unstaged:
                begins_s = began_s + num_unstaged * self._cost.block_out_s
            self._out_ended_s = began_s + num_out * self._cost.block_out_s
            self._staged.append((self._out_ended_s, num_staged))
            self._unmeasured.append(_Span(num_out, self._out_ended_s - began_s, self._out_ended_s))
        if plan.swap_ins:
            began_s = max(self._in_ended_s, begins_s)
            self._in_ended_s = began_s + len(plan.swap_ins) * self._cost.block_in_s
            self._unmeasured.append(
                _Span(len(plan.swap_ins), self._in_ended_s - began_s, self._in_ended_s)
            )
        return begins_s

    def take_measurement(self, now_s: float) -> tuple[int, float]:
        """Return how many blocks were copied since the last call, and the seconds that took."""
        num_blocks, seconds = 0, 0.0
        while self._unmeasured and self._unmeasured[0].ended_s <= now_s:
            span = self._unmeasured.popleft()
            num_blocks += span.num_blocks
            seconds += span.seconds
        return num_blocks, seconds

    def _stage(self, num_blocks: int, now_s: float) -> int:
        """Take staging blocks; return how many of the wanted blocks were free."""
        while self._staged and self._staged[0][0] <= now_s:
            self._num_staging += self._staged.popleft()[1]
        num_staged = min(num_blocks, self._num_staging)
        self._num_staging -= num_staged
        return num_staged
