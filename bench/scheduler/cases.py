"""What the scheduler's policy promises, as workloads in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from bench.scheduler.replica import BLOCK_S, STEP_S, TOKEN_S, make_replica
from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualCall, VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from pagedray.config import Preemption

__all__ = [
    "FLOODS",
    "FULL_STEP_S",
    "WORKLOADS",
    "Flood",
    "Workload",
    "decodes_beside_prompt",
    "first_token_times",
    "throughput_of_pool",
    "throughput_of_preemption",
    "wait_behind_large",
]

BUDGET = 2048
FULL_STEP_S = STEP_S + BUDGET * TOKEN_S
"""Duration of a step that uses its whole budget."""
NUM_ROWS = 64

Flood = Literal["none", "prompts of 500", "prompts of 32 000", "outputs of 4 000", "full pool"]
FLOODS: tuple[Flood, ...] = ("prompts of 500", "prompts of 32 000", "outputs of 4 000", "full pool")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FloodShape:
    num_requests: int = 0
    num_prompt_tokens: int = 1
    num_output_tokens: int = 1
    num_blocks: int = 40_000


_SHAPES: dict[Flood, _FloodShape] = {
    "none": _FloodShape(),
    "prompts of 500": _FloodShape(num_requests=4000, num_prompt_tokens=500, num_output_tokens=20),
    "prompts of 32 000": _FloodShape(
        num_requests=100, num_prompt_tokens=32_000, num_output_tokens=20
    ),
    "outputs of 4 000": _FloodShape(
        num_requests=300, num_prompt_tokens=100, num_output_tokens=4000
    ),
    # About 30 of its sequences fit.
    "full pool": _FloodShape(
        num_requests=200, num_prompt_tokens=2000, num_output_tokens=4000, num_blocks=5000
    ),
}


Workload = Literal["shared prefix", "long outputs", "long prompts", "forks", "slow copies"]
WORKLOADS: tuple[Workload, ...] = (
    "shared prefix",
    "long outputs",
    "long prompts",
    "forks",
    "slow copies",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreemptionShape:
    num_blocks: int
    num_shared_tokens: int = 0
    num_own_tokens: int
    num_output_tokens: int
    n: int = 1
    block_s: float = BLOCK_S


_WORKLOADS: dict[Workload, _PreemptionShape] = {
    "shared prefix": _PreemptionShape(
        num_blocks=2000, num_shared_tokens=12_800, num_own_tokens=50, num_output_tokens=900
    ),
    "long outputs": _PreemptionShape(num_blocks=3000, num_own_tokens=50, num_output_tokens=2000),
    "long prompts": _PreemptionShape(num_blocks=6000, num_own_tokens=4000, num_output_tokens=1000),
    "forks": _PreemptionShape(num_blocks=3000, num_own_tokens=1000, num_output_tokens=1500, n=8),
    "slow copies": _PreemptionShape(
        num_blocks=3000, num_own_tokens=50, num_output_tokens=2000, block_s=600e-6
    ),
}


def wait_behind_large(*, num_newcomers: int) -> tuple[VirtualCall, list[VirtualCall]]:
    """Return a request too large for the free half of the blocks, and those that arrive after it.

    The other half is held for 2 000 steps. Those requests arrive every 10 ms.
    """
    replica = make_replica(num_blocks=1000, max_model_len=16_000)
    replica.submit(distinct_prompt(0, 7984), num_output_tokens=2000, tenant="first")
    large = replica.submit(
        distinct_prompt(1, 12_000), num_output_tokens=10, tenant="large", arrival_s=0.3
    )
    newcomers = [
        replica.submit(
            distinct_prompt(2 + number, 20),
            num_output_tokens=20,
            tenant=f"newcomer {number % 3}",
            arrival_s=0.5 + number / 100,
        )
        for number in range(num_newcomers)
    ]
    replica.run()
    return large, newcomers


def decodes_beside_prompt(
    *, itl_target_ms: float | None, num_prompt_tokens: int = 128_000
) -> tuple[list[float], float]:
    """Return the times between tokens while a long prompt is computed, sorted, and its TTFT.

    32 sequences decode beside it, with the step times of Llama 8B on an H200. In seconds.
    """
    replica = VirtualReplica(
        SchedulerConfig(
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=8192,
            max_queued_tokens=10**9,
            itl_target_ms=itl_target_ms,
        ),
        KvOptions(block_size=16, num_blocks=50_000, num_cpu_blocks=0),
        LLAMA_8B_H200,
        max_model_len=num_prompt_tokens + 1000,
    )
    decodes = [
        replica.submit(distinct_prompt(number, 200), num_output_tokens=10**5)
        for number in range(32)
    ]
    prompt = replica.submit(
        distinct_prompt(32, num_prompt_tokens), num_output_tokens=1, arrival_s=1.0
    )
    while prompt.end_s is None:
        replica.run(num_steps=1)
    times = sorted(
        later_s - earlier_s
        for call in decodes
        for earlier_s, later_s in pairwise(call.token_times_s)
        if later_s > prompt.arrival_s
    )
    return times, prompt.ttft_s


def throughput_of_pool(part: float, *, has_limit: bool, preemption: Preemption = "auto") -> float:
    """Return the generated tokens per second with a part of the pool that 64 rows need.

    Unless it `has_limit`, a sequence may grow up to the model's length.
    """
    rng = random.Random(1)
    shapes = [(rng.randint(20, 100), rng.randint(300, 2000)) for _ in range(192)]
    # What 64 rows held at most with a pool of any size.
    num_blocks = 3705
    replica = make_replica(
        num_blocks=int(part * num_blocks),
        num_cpu_blocks=num_blocks,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=32_768,
        preemption=preemption,
    )
    for number, (num_prompt_tokens, num_output_tokens) in enumerate(shapes):
        replica.submit(
            distinct_prompt(number, num_prompt_tokens),
            num_output_tokens=num_output_tokens,
            has_limit=has_limit,
        )
    replica.run()
    return replica.num_generated_tokens / replica.now_s


def throughput_of_preemption(workload: Workload, preemption: Preemption) -> float:
    """Return the generated tokens per second of 128 requests for which the pool is too small."""
    rng = random.Random(2)
    shape = _WORKLOADS[workload]
    shared = distinct_prompt(10**6, shape.num_shared_tokens)
    replica = make_replica(
        num_blocks=shape.num_blocks,
        num_cpu_blocks=60_000,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=shape.num_blocks * 8,
        preemption=preemption,
        block_s=shape.block_s,
    )
    for number in range(128 // shape.n):
        own = rng.randint(1, 2 * shape.num_own_tokens)
        replica.submit(
            shared + distinct_prompt(number, own),
            num_output_tokens=rng.randint(shape.num_output_tokens // 2, shape.num_output_tokens),
            # The first one has computed what is shared before the others arrive.
            arrival_s=1.0 if number else 0.0,
            n=shape.n,
        )
    replica.run()
    return replica.num_generated_tokens / replica.now_s


def first_token_times(flood: Flood, *, duration_s: float) -> list[float]:
    """Return the times to first token of a light tenant beside a flood of another, sorted.

    It sends prompts of 100 tokens, two in a second on average, from second 2 on.
    """
    shape, rng = _SHAPES[flood], random.Random(3)
    replica = make_replica(
        num_blocks=shape.num_blocks,
        num_cpu_blocks=8000,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=BUDGET,
        max_model_len=33_000,
    )
    for number in range(shape.num_requests):
        replica.submit(
            distinct_prompt(number, shape.num_prompt_tokens),
            num_output_tokens=shape.num_output_tokens,
            tenant="flood",
        )
    light: list[VirtualCall] = []
    arrival_s = 2.0
    while arrival_s < 2.0 + duration_s:
        light.append(
            replica.submit(
                distinct_prompt(10**6 + len(light), 100),
                num_output_tokens=20,
                tenant="light",
                arrival_s=arrival_s,
            )
        )
        arrival_s += rng.expovariate(2)
    # One that has no token then waited for 100 s.
    replica.run(until_s=102.0 + duration_s, num_steps=int(duration_s * 90) + 400)
    return sorted(
        102.0 if call.first_token_s is None else call.first_token_s - call.arrival_s
        for call in light
    )
