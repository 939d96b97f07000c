"""The replica on which `bench/scheduler/cases.py` runs its workloads.

A step takes 12 ms and 30 us for each token. A block is copied between the pools in 45 us, beside
the steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_replica import VirtualReplica
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from pagedray.config import Preemption

__all__ = ["BLOCK_S", "STEP_S", "TOKEN_S", "make_replica"]

STEP_S = 12e-3
TOKEN_S = 30e-6
BLOCK_S = 45e-6


def make_replica(
    *,
    num_blocks: int,
    num_cpu_blocks: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 32768,
    preemption: Preemption = "auto",
    block_s: float = BLOCK_S,
) -> VirtualReplica:
    """Return a replica with a queue that never fills."""
    return VirtualReplica(
        SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_queued_requests=10**6,
            max_queued_tokens=10**9,
            preemption=preemption,
        ),
        KvOptions(block_size=16, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks),
        StepCost.linear(step_s=STEP_S, token_s=TOKEN_S, block_s=block_s),
        max_model_len=max_model_len,
    )
