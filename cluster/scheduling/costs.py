"""The costs of copying blocks and of recomputing them, by the durations that ranks report.

Blocks stand for bytes, since all have the same size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.batch import StepOutput, StepPlan

__all__ = ["CostMeter", "StepPace", "StepTimes", "SwapCosts", "TierPolicy"]

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

_KEPT_FIT = 0.98
"""Weight of a step relative to the next step."""
_TOKEN_UNIT = 1e-3
_PAIR_UNIT = 1e-6
"""The features are scaled to about 1, so that the equations are well conditioned."""
_TOLERANCE = 1e-6
"""The part of the squares by which a fit with more features must be better than with fewer."""
_Vector = list[float]
# The time of a token comes first: a single step says nothing about the others.
_SUBSETS = ((1,), (0,), (2,), *combinations(range(3), 2), (0, 1, 2))
_LEAST_TOKENS = 64
"""Tokens of prompts that any step may have, so that prompts end although decodes take longer."""
_FIRST_TOKENS = 256
"""Tokens of steps before the first measurement; afterwards at most twice the measured number."""
_KEPT_STEPS = 0.8
"""Weight of a step's error relative to the next step."""
_MOST_ERROR = 8.0


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
        "_num_full",
        "_num_until_check",
        "is_open",
    )

    def __init__(
        self, costs: SwapCosts | None, *, num_blocks: int, block_size: int, num_full: int = 1
    ) -> None:
        """Without costs, every copy is worth it; the CPU pool has `num_blocks`.

        Most blocks that are found belong to `num_full` groups without a window.
        """
        self._num_full = num_full
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

    def is_restored(self, num_blocks: int, *, first: int, end: int) -> bool:
        """Return whether to copy found blocks of some entries back rather than compute these."""
        if self._costs is not None and not self._costs.choose_restore(
            num_blocks=num_blocks,
            first_position=first * self._block_size,
            num_tokens=(end - first) * self._block_size,
        ):
            return False
        self._num_found += num_blocks
        return True

    def is_read(self, num_blocks: int, *, num_reading: int, first: int, num_entries: int) -> bool:
        """Return whether to read the blocks of some entries from the disk rather than compute them.

        They wait for `num_reading` others.
        """
        return self._costs is None or self._costs.choose_read(
            num_blocks=num_blocks,
            num_reading=num_reading,
            first_position=first * self._block_size,
            num_tokens=num_entries * self._block_size,
        )

    def clear(self) -> None:
        """Forget all lost blocks: the blocks of new ranks are empty."""
        self._lost.clear()

    def _check(self, costs: SwapCosts) -> None:
        """Compare the cost of recent evictions with the savings."""
        self.is_open = costs.pays(
            num_copied=self._num_evicted,
            num_found=self._num_found,
            num_tokens=-(-self._block_size // self._num_full),
        )
        if self._num_evicted > _MOST_WEIGHT:
            self._num_evicted /= 2
            self._num_found /= 2


class StepTimes:
    """A fit of step times that forgets old steps."""

    __slots__ = ("_products", "_squares", "_targets", "_weights")

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self._squares = 0.0
        self._weights: _Vector | None = None
        """The fit; None if a step was noted since."""

    @property
    def is_measured(self) -> bool:
        """Whether a step was noted."""
        return self._squares > 0.0

    def note_step(self, *, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Add a step; `num_pairs` counts pairs of its tokens and the tokens that they attend to."""
        self._weights = None
        features = (1.0, num_tokens * _TOKEN_UNIT, num_pairs * _PAIR_UNIT)
        self._squares = _KEPT_FIT * self._squares + seconds * seconds
        for i, feature in enumerate(features):
            self._targets[i] = _KEPT_FIT * self._targets[i] + feature * seconds
            row = self._products[i]
            for j, other in enumerate(features):
                row[j] = _KEPT_FIT * row[j] + feature * other

    def marginal_s(self, *, num_tokens: int, num_pairs: int) -> float:
        """Return by how much tokens prolong the steps that compute them, without the fixed time."""
        _, token_s, pair_s = self._fit()
        return num_tokens * _TOKEN_UNIT * token_s + num_pairs * _PAIR_UNIT * pair_s

    def step_s(self, *, num_tokens: int, num_pairs: int) -> float:
        """Return how long a step takes; 0 if none was measured."""
        return self._fit()[0] + self.marginal_s(num_tokens=num_tokens, num_pairs=num_pairs)

    def num_tokens_within(self, seconds: float, *, first_position: int) -> float:
        """Return how many tokens of a prompt, from a position on, a step computes in so much time.

        The fixed time of the step is not included.
        """
        if seconds <= 0.0:
            return 0
        _, token_s, pair_s = self._fit()
        pair_s *= _PAIR_UNIT
        # Token i from there on attends to `first_position` + i + 1.
        linear, square = token_s * _TOKEN_UNIT + pair_s * (first_position + 0.5), pair_s / 2
        if not linear:
            return math.inf
        # The root of square * n * n + linear * n - seconds, also if `square` is 0.
        root = math.sqrt(linear * linear + 4.0 * square * seconds)
        return int(2.0 * seconds / (linear + root))

    def _fit(self) -> _Vector:
        """Return the weights of the features, none of which is negative."""
        if self._weights is None:
            self._weights = self._find_weights()
        return self._weights

    def _find_weights(self) -> _Vector:
        best, least = [0.0] * 3, self._squares
        for subset in _SUBSETS:
            found = self._fit_subset(subset)
            if found is None:
                continue
            weights, error = found
            if error < least - _TOLERANCE * self._squares:
                best, least = weights, error
        return best

    def _fit_subset(self, subset: tuple[int, ...]) -> tuple[_Vector, float] | None:
        """Return weights of features and the sum of squared errors, or None if a weight is < 0."""
        solution = _solve(
            [[self._products[i][j] for j in subset] for i in subset],
            [self._targets[i] for i in subset],
        )
        if solution is None or min(solution) < 0.0:
            return None
        weights = [0.0] * 3
        for i, weight in zip(subset, solution, strict=True):
            weights[i] = weight
        # At the least squares, the products with the errors are 0.
        explained = sum(w * target for w, target in zip(weights, self._targets, strict=True))
        return weights, self._squares - explained


def _solve(matrix: list[_Vector], right: _Vector) -> _Vector | None:
    """Return the solution of a small positive definite system, or None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i, row in enumerate(rows):
        if row[i] <= 1e-9 * matrix[i][i]:
            return None
        for other in rows[i + 1 :]:
            factor = other[i] / row[i]
            for j in range(i, size + 1):
                other[j] -= factor * row[j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


class StepPace:
    """Shortens steps with running sequences to a target time, by the fit of measured steps.

    The average error of the fit over recent steps with prompts is corrected.
    """

    __slots__ = (
        "_actual_s",
        "_left_s",
        "_most_tokens",
        "_num_left",
        "_predicted_s",
        "_target_s",
        "_times",
    )

    def __init__(self, target_s: float, times: StepTimes) -> None:
        self._target_s = target_s
        self._times = times
        self._actual_s = self._predicted_s = 0.0
        self._most_tokens = _FIRST_TOKENS // 2
        """The most tokens of prompts in a measured step."""
        self._left_s = math.inf
        self._num_left = 0
        """Tokens that may be added even beyond the target time."""

    def note_step(
        self, *, num_tokens: int, num_pairs: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        """Note a measured step with prompts, before it is added to the fit."""
        predicted_s = self._times.step_s(num_tokens=num_tokens, num_pairs=num_pairs)
        if predicted_s > 0.0:
            self._predicted_s = _KEPT_STEPS * self._predicted_s + predicted_s
            self._actual_s = _KEPT_STEPS * self._actual_s + seconds
        self._most_tokens = max(num_prompt_tokens, self._most_tokens)

    def begin_step(self, *, num_tokens: int, num_pairs: int) -> None:
        """Begin a step with the decodes that are planned; without any it may take any time."""
        if not num_tokens:
            self._left_s, self._num_left = math.inf, 0
            return
        error = 1.0
        if self._predicted_s:
            error = self._actual_s / self._predicted_s
            error = min(max(error, 1.0 / _MOST_ERROR), _MOST_ERROR)
        decodes_s = self._times.step_s(num_tokens=num_tokens, num_pairs=num_pairs)
        self._left_s = self._target_s / error - decodes_s
        self._num_left = _LEAST_TOKENS

    def num_tokens(self, first_position: int) -> float:
        """Return how many tokens of a prompt may be added from a position on."""
        if self._left_s == math.inf:
            return math.inf
        fitting = self._times.num_tokens_within(self._left_s, first_position=first_position)
        return max(min(fitting, 2 * self._most_tokens), self._num_left)

    def add_tokens(self, num_tokens: int, *, first_position: int) -> None:
        """Note that tokens of a prompt were added."""
        num_pairs = num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
        self._left_s -= self._times.marginal_s(num_tokens=num_tokens, num_pairs=num_pairs)
        self._num_left = max(self._num_left - num_tokens, 0)
