"""What the KV cache of a rank may take: the plans that show what steps need, and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.batch import SequencePlan, SequenceStart, StepMasks, StepPlan
from pagedray.request import MAX_LOGPROBS, SamplingParams
from pagedray.system.host_memory import available_host_bytes
from workers.sampling.masks import num_mask_bytes

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = [
    "MAX_HOST_POOL_BYTES",
    "allow_all_tokens",
    "free_host_bytes",
    "host_pool_bytes",
    "largest_steps",
]

MAX_HOST_POOL_BYTES = 4 * 2**30
"""Limit of the pools of a CPU whose size no option gives."""
_MAX_PINNED_BYTES = 64 * 2**30
"""Limit of a CPU pool beside a GPU whose size no option gives."""
_PINNED_PART = 4
"""All CPU pools of a node take one in so many of its available bytes."""


def free_host_bytes(config: EngineConfig) -> int:
    """Return the bytes of host memory that the cache of one rank may take."""
    share = available_host_bytes() // 2 // config.parallel.tensor_parallel_size
    return min(MAX_HOST_POOL_BYTES, int(share * config.cache.memory_fraction))


def host_pool_bytes(config: EngineConfig) -> int:
    """Return the bytes of the CPU pool of one rank if no option gives its size."""
    if config.parallel.device == "cpu":
        return MAX_HOST_POOL_BYTES // 4
    # The ranks of a group may be on several nodes; then the pools are smaller than they could be.
    share = available_host_bytes() // _PINNED_PART // config.parallel.tensor_parallel_size
    return min(_MAX_PINNED_BYTES, share)


def largest_steps(config: EngineConfig) -> list[StepPlan]:
    """Return two plans that fill all rows and the token budget: prompts, then long contexts.

    Their block tables are empty, so that all sequences read and write block 0.
    """
    num_batched_tokens = config.scheduler.max_num_batched_tokens
    num_rows = min(config.max_num_seqs, num_batched_tokens)
    num_left, num_tokens = num_batched_tokens, []
    for row in range(num_rows):
        num_tokens.append(min(config.max_model_len, num_left - (num_rows - row - 1)))
        num_left -= num_tokens[-1]
    # One sequence of maximum length is enough: backends bound the memory of many of them.
    depths = [config.max_model_len] + [num_batched_tokens] * (num_rows - 1)
    contexts = [min(d, config.max_model_len - n) for d, n in zip(depths, num_tokens, strict=True)]
    # Each of these sampling features allocates buffers of its own.
    sampling = SamplingParams(top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    return [
        StepPlan(
            step=step,
            starts=[
                SequenceStart(row, [0], 1, [], sampling, row, 0, is_masked=True)
                for row in range(num_rows)
            ],
            chunks=[
                SequencePlan(row, first_position, num_tokens[row], is_sampled=True)
                for row, first_position in enumerate(first_positions)
            ],
        )
        for step, first_positions in enumerate(([0] * num_rows, contexts))
    ]


def allow_all_tokens(plan: StepPlan, vocab_size: int) -> StepMasks:
    """Return masks that allow every token to every sequence of a plan."""
    size = num_mask_bytes(vocab_size)
    return StepMasks(plan.step, b"\xff" * size * len(plan.chunks))
