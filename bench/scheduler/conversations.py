"""Conversations over a shared prefix that outgrow the device pool, in virtual time.

A turn's prompt is the whole conversation so far and a new message. Its user reads the answer, then
writes the next message; in the meantime other conversations take the room of its blocks.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.stats import SchedulerStats
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import EOS, VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from cluster.simulation.virtual_replica import VirtualCall

__all__ = ["ConversationShape", "ConversationTimes", "run_conversations"]

_BLOCK_SIZE = 16
_TOKEN = 7
"""What every answer consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationShape:
    """How many conversations there are, and how long they get."""

    num_conversations: int = 64
    num_turns: int = 8
    num_shared_tokens: int = 8192
    num_message_tokens: int = 300
    """The mean; messages have from half as many to half as many more."""
    num_answer_tokens: int = 700
    think_s: float = 10.0
    """The mean time between an answer and the next message."""
    times_of_device_pool: float = 2.0
    """How often all conversations would fill the device pool."""

    @property
    def num_blocks(self) -> int:
        """Blocks of all conversations at their ends."""
        num_turn_tokens = self.num_message_tokens + self.num_answer_tokens
        num_tokens = self.num_conversations * self.num_turns * num_turn_tokens
        return (num_tokens + self.num_shared_tokens) // _BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTimes:
    """The times that users saw, and the counts of blocks."""

    ttft_s: list[float]
    """Of every turn but the first ones, sorted."""
    duration_s: float
    stats: SchedulerStats

    @property
    def mean_ttft_s(self) -> float:
        """Mean seconds to the first token, of every turn but the first ones."""
        return sum(self.ttft_s) / len(self.ttft_s)


def run_conversations(
    shape: ConversationShape, *, enable_cpu_prefix_cache: bool
) -> ConversationTimes:
    """Run all conversations to their ends, on a model of Llama-8B on an H200."""
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=shape.num_conversations, max_num_batched_tokens=2048),
        KvOptions(
            block_size=_BLOCK_SIZE,
            num_blocks=int(shape.num_blocks / shape.times_of_device_pool),
            num_cpu_blocks=shape.num_blocks,
            enable_cpu_prefix_cache=enable_cpu_prefix_cache,
        ),
        LLAMA_8B_H200,
        max_model_len=shape.num_blocks * _BLOCK_SIZE // 8,
    )
    draws, shared = random.Random(4), distinct_prompt(10**6, shape.num_shared_tokens)
    prompts = [list(shared) for _ in range(shape.num_conversations)]
    # The next messages, by time; the first ones arrive within a mean time to think.
    due = [(draws.random() * shape.think_s, number) for number in range(len(prompts))]
    heapq.heapify(due)
    num_sent = [0] * len(prompts)
    answering: dict[int, VirtualCall] = {}
    ttft_s: list[float] = []
    while due or answering:
        while due and (due[0][0] <= replica.now_s or not answering):
            arrival_s, number = heapq.heappop(due)
            half = shape.num_message_tokens // 2
            num_tokens = draws.randint(half, 3 * half)
            prompts[number] += distinct_prompt(number + 64 * num_sent[number], num_tokens)
            num_sent[number] += 1
            answering[number] = replica.submit(
                prompts[number], num_output_tokens=shape.num_answer_tokens, arrival_s=arrival_s
            )
        replica.run(num_steps=1)
        for number, call in list(answering.items()):
            if call.end_s is None:
                continue
            del answering[number]
            if num_sent[number] > 1:
                ttft_s.append(call.ttft_s)
            if num_sent[number] < shape.num_turns:
                prompts[number] += [_TOKEN] * (shape.num_answer_tokens - 1) + [EOS]
                wait_s = draws.expovariate(1 / shape.think_s)
                heapq.heappush(due, (call.end_s + wait_s, number))
    return ConversationTimes(
        ttft_s=sorted(ttft_s), duration_s=replica.now_s, stats=replica.scheduler.stats()
    )
