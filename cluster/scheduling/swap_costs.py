"""What swapping a sequence costs beside computing it again, as the last steps measured it.

Blocks stand for bytes, since all have one size. Nothing is measured here: the ranks say how
long a step took.
"""

__all__ = ["SwapCosts"]

_KEPT = 0.8
"""What an older measurement counts beside the next one."""
_MAX_UNMEASURED = 16
"""Choices against swapping after which it is measured again."""


class SwapCosts:
    """Chooses the cheaper way for a sequence to make room."""

    __slots__ = ("_num_unmeasured", "_prefill", "_swap")

    def __init__(self) -> None:
        self._swap = _MovingRate()
        self._prefill = _MovingRate()
        self._num_unmeasured = 0

    def note_swaps(self, num_blocks: int, seconds: float) -> None:
        """Note how long it took to copy blocks between the pools, either way."""
        self._num_unmeasured = 0
        self._swap.add(num_blocks, seconds)

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note how long a step took that mostly computed known tokens."""
        self._prefill.add(num_tokens, seconds)

    def choose_swap(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Return whether to copy blocks out and in, rather than compute the tokens again."""
        # What was never measured, or not for long, is tried: one bad copy must not decide for ever.
        if not (self._swap.per_s and self._prefill.per_s):
            return True
        if self._num_unmeasured >= _MAX_UNMEASURED:
            self._num_unmeasured = 0
            return True
        is_swap = 2 * num_blocks / self._swap.per_s < num_tokens / self._prefill.per_s
        self._num_unmeasured += not is_swap
        return is_swap


class _MovingRate:
    """An amount a second, of which the latest measurements count most."""

    __slots__ = ("_amount", "_seconds")

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def per_s(self) -> float:
        """The rate, or 0 if there is none yet."""
        return self._amount / self._seconds if self._seconds else 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Note one measurement; one of no time is none."""
        if seconds > 0.0:
            self._amount = _KEPT * self._amount + amount
            self._seconds = _KEPT * self._seconds + seconds
