"""What a rank reports to its controller about its CPU pool."""

from typing import NamedTuple

__all__ = ["PoolReport"]


class PoolReport(NamedTuple):
    """What became of a rank's CPU pool when the rank was made ready for an epoch."""

    is_shared: bool = False
    """Whether it is in the memory of the controller."""
    is_kept: bool = False
    """Whether it has what it had in the epoch before."""
    damaged: tuple[int, ...] = ()
    """Of a kept one, the blocks that are not known to be as they were."""
