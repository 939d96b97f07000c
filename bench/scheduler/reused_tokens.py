"""Prompt tokens that models with recurrent layers find, relative to others, in virtual time.

    python -m bench.scheduler.reused_tokens

Chats, most of which drop the reasoning of earlier turns, agents that repeat their outputs, and
questions about documents share system prompts. The sizes are those of Qwen3.5-35B-A3B: a state of
61 MiB is 197 blocks of 320 KiB.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import StepCost
from cluster.simulation.virtual_replica import EOS, VirtualReplica
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from cluster.simulation.virtual_replica import VirtualCall

__all__ = ["ConversationLoad", "part_reused"]

_GB_BLOCKS = 3052
"""Blocks of 1 GB."""
_STATE_BLOCKS = 197
_START_OF_ANSWER = (3, 4, 5, 6)
_ANSWER_TOKEN = 7
_Kind = Literal["chat without reasoning", "chat", "agent", "document"]
_SHARES: dict[_Kind, float] = {
    "chat without reasoning": 0.48,
    "chat": 0.12,
    "agent": 0.25,
    "document": 0.15,
}
_MESSAGE_TOKENS = {"chat without reasoning": 400, "chat": 400, "agent": 900, "document": 60}
_TURNS = {
    "chat without reasoning": (2, 14),
    "chat": (2, 14),
    "agent": (4, 20),
    "document": (2, 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLoad:
    """How many conversations there are, and in how much time they begin."""

    seed: int = 1
    num_conversations: int = 150
    num_system_prompts: int = 24
    duration_s: float = 2880.0
    think_s: float = 15.0
    """The mean time between an answer and the next message."""


class _Conversation:
    """A conversation, of which each prompt has all that is kept of the turns before."""

    def __init__(self, draws: random.Random, system_prompts: list[list[int]]) -> None:
        self._draws = draws
        self.kind: _Kind = draws.choices(list(_SHARES), list(_SHARES.values()))[0]
        # Some system prompts are used far more often than others.
        rank = min(int(draws.expovariate(1 / 6)), len(system_prompts) - 1)
        self._text = list(system_prompts[rank])
        self._num_system_tokens = len(self._text)
        self.num_left = draws.randint(*_TURNS[self.kind])
        """Turns that are left."""
        self._num_answer_tokens = 0
        if self.kind == "document":
            self._text += self._words(draws.choice((1000, 4000, 10_000, 20_000, 40_000)))

    def submit(self, replica: VirtualReplica, arrival_s: float) -> VirtualCall:
        """Send the next message."""
        self.num_left -= 1
        num_tokens = max(5, int(self._draws.expovariate(1 / _MESSAGE_TOKENS[self.kind])))
        prompt = self._text + self._words(num_tokens)
        anchors = self._num_system_tokens, len(prompt)
        if self.kind != "document":
            self._text = prompt
        self._num_answer_tokens = self._draws.randint(20, 200)
        return replica.submit(
            [*prompt, *_START_OF_ANSWER],
            num_output_tokens=self._num_answer_tokens,
            arrival_s=arrival_s,
            anchors=anchors,
        )

    def end_turn(self) -> float:
        """Add the answer to the conversation; return a factor of the time until the next turn."""
        number = self._num_answer_tokens
        if self.kind == "chat without reasoning":
            self._text = [*self._text, 8, *self._words(number // 3 + 1)]
        elif self.kind != "document":
            answer = [_ANSWER_TOKEN] * (number - 1) + [EOS]
            self._text = [*self._text, *_START_OF_ANSWER, *answer]
        return self._draws.expovariate(1.0)

    def _words(self, number: int) -> list[int]:
        return [self._draws.randint(10, 10**6) for _ in range(number)]


def part_reused(
    load: ConversationLoad, *, num_blocks: int, num_cpu_blocks: int = 0, state_blocks: int
) -> float:
    """Return the part of all prompt tokens that was found in the prefix cache."""
    draws = random.Random(load.seed)
    system_prompts = [
        [draws.randint(10, 10**6) for _ in range(draws.randint(200, 4000))]
        for _ in range(load.num_system_prompts)
    ]
    replica = VirtualReplica(
        SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=8192),
        KvOptions(
            block_size=16,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            state_blocks=state_blocks,
        ),
        StepCost(points=((0, 0.008), (8192, 0.25))),
        max_model_len=120_000,
    )
    conversations = [
        _Conversation(random.Random(1000 * load.seed + number), system_prompts)
        for number in range(load.num_conversations)
    ]
    due = [(draws.random() * load.duration_s, number) for number in range(len(conversations))]
    heapq.heapify(due)
    answering: dict[int, VirtualCall] = {}
    while due or answering:
        while due and (due[0][0] <= replica.now_s or not answering):
            arrival_s, number = heapq.heappop(due)
            arrival_s = max(arrival_s, replica.now_s)
            answering[number] = conversations[number].submit(replica, arrival_s)
        replica.run(num_steps=20)
        for number, call in list(answering.items()):
            if call.end_s is None:
                continue
            del answering[number]
            wait_s = load.think_s * conversations[number].end_turn()
            if conversations[number].num_left:
                heapq.heappush(due, (call.end_s + wait_s, number))
    stats = replica.scheduler.stats()
    return stats.num_hit_tokens / stats.num_queried_tokens


def main() -> None:
    """Print the parts for pools of several sizes."""
    parser = argparse.ArgumentParser(description="Prompt tokens found with recurrent states.")
    parser.add_argument("--seed", type=int, action="append", help="of conversations (1, 2 and 3)")
    options = parser.parse_args()
    print("| device, GB | CPU pool, GB | seed | without states | with states | ratio |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_gb, num_cpu_gb in ((100, 0), (6, 0), (4, 0), (3, 0), (3, 12)):
        for seed in options.seed or (1, 2, 3):
            dense, found = (
                part_reused(
                    ConversationLoad(seed=seed),
                    num_blocks=num_gb * _GB_BLOCKS,
                    num_cpu_blocks=num_cpu_gb * _GB_BLOCKS,
                    state_blocks=state_blocks,
                )
                for state_blocks in (0, _STATE_BLOCKS)
            )
            sizes = f"{num_gb} | {num_cpu_gb} | {seed}"
            print(f"| {sizes} | {dense:.3f} | {found:.3f} | {found / dense:.3f} |", flush=True)


if __name__ == "__main__":
    main()
