"""Two ranks in one process."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch

from tests.workers.parallel.joined_group import join_group
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.parallel.group import ParallelGroup

__all__ = ["on_two_ranks"]

CPU = torch.device("cpu")
T = TypeVar("T")


def on_two_ranks(run: Callable[[ParallelGroup], T]) -> list[T]:
    """Return what each of two ranks returns; they are threads, each with a group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run_rank(rank: int) -> T:
        with join_group(rank, 2, device=CPU, address=(LOOPBACK, port), timeout_s=60.0) as group:
            result = run(group)
            group.barrier()
            return result

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_rank, range(2)))
