"""What a rank reports to its controller about its CPU pool."""

from typing import NamedTuple

__all__ = ["PoolReport"]


class PoolReport(NamedTuple):
    """The state of a rank's CPU pool when the rank was made ready for an epoch."""

    is_shared: bool = False
    """Whether it is in the memory of the controller."""
    is_kept: bool = False
    """Whether it has the contents of the epoch before."""
    damaged: tuple[int, ...] = ()
    """The blocks of a kept pool whose contents may have changed."""
