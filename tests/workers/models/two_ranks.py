"""Several ranks in one process."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tests.workers.parallel.joined_group import join_group
from workers.parallel.group import ParallelGroup
from workers.parallel.rendezvous import LOOPBACK

CPU = torch.device("cpu")
T = TypeVar("T")


def on_two_ranks(run: Callable[[ParallelGroup], T]) -> list[T]:
    """Return the result of each of two ranks."""
    return on_ranks(2, run)


def on_ranks(size: int, run: Callable[[ParallelGroup], T]) -> list[T]:
    """Return the result of each rank; ranks are threads, each with a group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run_rank(rank: int) -> T:
        with join_group(rank, size, device=CPU, address=(LOOPBACK, port), timeout_s=60.0) as group:
            result = run(group)
            group.barrier()
            return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_rank, range(size)))
