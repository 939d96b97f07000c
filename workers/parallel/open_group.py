"""Opens the group of a rank: one rank alone, or processes that meet at a rendezvous."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.parallel.group import SoloGroup
from workers.parallel.process_group import ProcessGroup
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    import torch

    from workers.parallel.group import ParallelGroup
    from workers.parallel.rendezvous import Rendezvous

__all__ = ["open_group"]


def open_group(
    rank: int,
    size: int,
    *,
    device: torch.device,
    address: tuple[str, int] = (LOOPBACK, 0),
    host: str = LOOPBACK,
    rendezvous: Rendezvous | None = None,
    timeout_s: float = 300.0,
) -> ParallelGroup:
    """Return the group of `size` ranks for rank `rank`; a single rank needs no address."""
    if size == 1:
        if rendezvous is not None:
            rendezvous.close()
        return SoloGroup()
    return ProcessGroup(
        rank,
        size,
        device=device,
        address=address,
        host=host,
        rendezvous=rendezvous,
        timeout_s=timeout_s,
    )
