"""Conversations over several replicas behind the router, in virtual time.

    python -m bench.routed_conversations --output bench/results/routed_conversations.json

200 conversations of a model like Llama-8B on 4 H200. A turn's prompt is the whole conversation so
far and a new message. The router places by hashing alone, or also remembers where load has moved a
conversation. What counts is the part of the prompts that replicas compute: they have the rest in
their caches.
"""

from __future__ import annotations

import argparse
import heapq
import json
import platform
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.records.command import command_and_date
from cluster.scheduling.kv_manager import KvOptions
from cluster.serving.ray_serve.placement import Placement
from cluster.simulation.fleet import Fleet
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import EOS, VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from cluster.simulation.virtual_replica import VirtualCall

__all__ = ["ConversationLoad", "RoutedTimes", "run_routed_conversations"]

_BLOCK_SIZE = 16
_TOKEN = 7
"""What every answer consists of."""
_NUM_TENANTS = 20
_TITLES = ("blocks", "think, s", "routing", "part computed", "mean TTFT, s", "p99, s")
_WAYS = (
    ("hashing, 1.25 times the mean load", 1.25, 0),
    ("hashing, 1.5 times", 1.5, 0),
    ("hashing and memory, 1.5 times", 1.5, 16_384),
)
"""Names, the bound of load, and how many keys are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLoad:
    """The behavior of users, and the size of replicas."""

    num_conversations: int = 200
    num_replicas: int = 4
    num_turns: int = 10
    num_first_tokens: int = 4000
    """The mean length of a first message, exponentially distributed: a document."""
    num_message_tokens: int = 300
    """The mean; messages have from half as many to half as many more."""
    num_answer_tokens: int = 400
    think_s: float = 10.0
    """The mean time between an answer and the next message."""
    num_blocks: int = 16_384
    """Of each replica; 16 384 take 32 GiB."""
    seed: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedTimes:
    """The times that users saw, and the tokens that replicas computed."""

    ttft_s: list[float]
    """Of every turn but the first ones, sorted."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Of the prompts; tokens of preempted sequences that are computed again count."""


def run_routed_conversations(load: ConversationLoad, placement: Placement) -> RoutedTimes:
    """Run all conversations to their ends."""
    fleet = Fleet(lambda: _replica(load), num_replicas=load.num_replicas, placement=placement)
    draws = random.Random(load.seed)
    prompts: list[list[int]] = [[] for _ in range(load.num_conversations)]
    # The next messages, by time; the first ones arrive within a mean time to think.
    due = [(draws.random() * load.think_s, number) for number in range(len(prompts))]
    heapq.heapify(due)
    num_sent = [0] * len(prompts)
    answering: dict[int, VirtualCall] = {}
    ttft_s: list[float] = []
    num_prompt_tokens = 0
    while due or answering:
        until_s = fleet.begin_tick()
        while due and due[0][0] < until_s:
            arrival_s, number = heapq.heappop(due)
            half = load.num_message_tokens // 2
            num_tokens = draws.randint(half, 3 * half)
            if not num_sent[number]:
                num_tokens += int(draws.expovariate(1 / load.num_first_tokens))
            first_number = number + load.num_conversations * num_sent[number]
            prompts[number] += distinct_prompt(first_number, num_tokens)
            num_sent[number] += 1
            num_prompt_tokens += len(prompts[number])
            answering[number] = fleet.submit(
                prompts[number],
                num_output_tokens=load.num_answer_tokens,
                arrival_s=arrival_s,
                tenant=f"tenant {number % _NUM_TENANTS}",
            )
        fleet.end_tick()
        for number, call in list(answering.items()):
            if call.end_s is None:
                assert not call.error, call.error
                continue
            del answering[number]
            if num_sent[number] > 1:
                ttft_s.append(call.ttft_s)
            if num_sent[number] < load.num_turns:
                prompts[number] += [_TOKEN] * (load.num_answer_tokens - 1) + [EOS]
                wait_s = draws.expovariate(1 / load.think_s)
                heapq.heappush(due, (max(call.end_s + wait_s, until_s), number))
    stats = [one.scheduler.stats() for one in fleet.replicas]
    num_generated = sum(one.num_generated_tokens for one in fleet.replicas)
    return RoutedTimes(
        ttft_s=sorted(ttft_s),
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=sum(one.num_scheduled_tokens for one in stats) - num_generated,
    )


def _replica(load: ConversationLoad) -> VirtualReplica:
    return VirtualReplica(
        SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
        KvOptions(block_size=16, num_blocks=load.num_blocks, num_cpu_blocks=0),
        LLAMA_8B_H200,
        max_model_len=65_536,
    )


def main() -> int:
    """Print what each way of routing computes, by the pool and by how fast users write."""
    parser = argparse.ArgumentParser(description="Conversations over several replicas.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, float | str]] = []
    print(f"| {' | '.join(_TITLES)} |\n|{' ---: |' * len(_TITLES)}")
    for num_blocks in (16_384, 24_576):
        for think_s in (30.0, 15.0, 8.0):
            load = ConversationLoad(think_s=think_s, num_blocks=num_blocks)
            for name, slack, most_keys in _WAYS:
                placement = Placement(draws=random.Random(0), slack=slack, most_keys=most_keys)
                times = run_routed_conversations(load, placement)
                rows.append(_row(name, load, times))
                print(f"| {' | '.join(map(_cell, rows[-1].values()))} |", flush=True)
    if options.output:
        report = {
            **command_and_date(),
            "python": platform.python_version(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _row(name: str, load: ConversationLoad, times: RoutedTimes) -> dict[str, float | str]:
    return {
        "num_blocks": load.num_blocks,
        "think_s": load.think_s,
        "routing": name,
        "computed": times.num_computed_tokens / times.num_prompt_tokens,
        "mean_ttft_s": sum(times.ttft_s) / len(times.ttft_s),
        "p99_ttft_s": times.ttft_s[len(times.ttft_s) * 99 // 100],
    }


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}".rstrip("0").rstrip(".")


if __name__ == "__main__":
    sys.exit(main())
