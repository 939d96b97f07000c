"""The costs of copying blocks and of recomputing them, by the durations that ranks report.

Blocks stand for bytes, since all have the same size.
"""

from cluster.scheduling.costs.step_times import StepTimes

__all__ = ["SwapCosts"]

_KEPT = 0.8
"""Weight of a measurement relative to the next one."""
_MAX_UNMEASURED = 16
"""Choices against swapping after which it is tried again."""


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

        A block has `num_tokens`. What its tokens attend to is not counted in its favor.
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
