"""Makes the group of a rank: one rank alone, or processes that meet at a rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.parallel.group import SoloGroup
from workers.parallel.process_group import ProcessGroup

if TYPE_CHECKING:
    import torch

    from pagedray.rank_progress import ProgressWord
    from workers.parallel.group import ParallelGroup
    from workers.parallel.row_shape import RowShape

__all__ = ["make_group"]

_TIMEOUT_S = 300.0


def make_group(
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float = _TIMEOUT_S,
    progress: ProgressWord | None = None,
    rows: RowShape | None = None,
) -> ParallelGroup:
    """Return the group of `size` ranks for rank `rank`, which has not joined it yet.

    `rows` is the shape of the rows that layers sum over the ranks, for the faster all-reduce of
    GPUs.
    """
    if size == 1:
        return SoloGroup(progress)
    return ProcessGroup(
        rank, size, device=device, timeout_s=timeout_s, progress=progress, rows=rows
    )
