"""Groups of ranks that have found each other."""

import torch

from workers.parallel.group import ParallelGroup
from workers.parallel.process_group import make_group
from workers.parallel.rendezvous import LOOPBACK, GroupAddress


def join_group(
    rank: int,
    size: int,
    *,
    device: torch.device,
    timeout_s: float,
    address: GroupAddress = (LOOPBACK, 0),
) -> ParallelGroup:
    """Return the group of `size` ranks after joining it; a single rank needs no address."""
    group = make_group(rank, size, device=device, timeout_s=timeout_s)
    group.join(address, host=LOOPBACK)
    return group
