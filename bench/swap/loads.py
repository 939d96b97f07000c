"""Requests that need more blocks than the device has."""

from __future__ import annotations

import heapq
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.engine import MAX_TOKEN_ID

if TYPE_CHECKING:
    from bench.swap.engine import MeasuredEngine, Reply

__all__ = ["ConversationLoad", "PoolLoad", "run_conversations", "run_pool"]

BLOCK_SIZE = 16
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Requests that are submitted at once and share nothing."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks in which all run at the same time."""
        # A request leaves one free for each that runs.
        num_tokens = self.num_prompt_tokens + self.num_new_tokens
        return self.num_requests * (-(-num_tokens // BLOCK_SIZE) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """How fast requests were served."""

    mode: str
    load: PoolLoad
    is_complete: bool
    seconds: float
    tokens_per_s: float
    """Generated ones."""
    num_blocks: int
    num_cpu_blocks: int
    num_swap_preemptions: int
    num_recompute_preemptions: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_saved_blocks: int
    num_restored_blocks: int
    start_s: float
    pin_s: float
    checksum: int
    """Of all tokens; equal where these are."""


def run_pool(engine: MeasuredEngine, load: PoolLoad, *, mode: str, limit_s: float) -> PoolFigures:
    """Serve all requests."""
    draws = random.Random(1)
    prompts = [_tokens(draws, load.num_prompt_tokens) for _ in range(load.num_requests)]
    # The first steps compile kernels.
    engine.submit(_tokens(draws, load.num_prompt_tokens // 2), 4)
    engine.wait(600.0)
    started_s = time.perf_counter()
    replies = [engine.submit(prompt, load.num_new_tokens) for prompt in prompts]
    is_complete = engine.wait(limit_s)
    seconds = time.perf_counter() - started_s
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    stats = engine.stats()
    engine.abort_all()
    return PoolFigures(
        mode=mode,
        load=load,
        is_complete=is_complete,
        seconds=round(seconds, 3),
        tokens_per_s=round(num_tokens / seconds, 1),
        num_blocks=stats.num_blocks,
        num_cpu_blocks=stats.num_cpu_blocks,
        num_swap_preemptions=stats.num_swap_preemptions,
        num_recompute_preemptions=stats.num_recompute_preemptions,
        num_swapped_out_blocks=stats.num_swapped_out_blocks,
        num_swapped_in_blocks=stats.num_swapped_in_blocks,
        num_saved_blocks=stats.num_saved_blocks,
        num_restored_blocks=stats.num_restored_blocks,
        start_s=round(engine.start_s, 2),
        pin_s=round(engine.pin_s, 2),
        checksum=hash(tuple(tuple(reply.token_ids) for reply in replies)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationLoad:
    """Conversations over a shared prefix, whose users read an answer before they write on."""

    num_conversations: int
    num_turns: int
    num_shared_tokens: int
    num_message_tokens: int
    num_answer_tokens: int
    think_s: float
    """The mean time between an answer and the next message."""

    @property
    def max_len(self) -> int:
        """The tokens of a conversation at its end."""
        num_turn_tokens = self.num_message_tokens + self.num_answer_tokens
        return self.num_shared_tokens + self.num_turns * num_turn_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks of all conversations at their ends."""
        num_own_tokens = self.max_len - self.num_shared_tokens
        num_tokens = self.num_conversations * num_own_tokens + self.num_shared_tokens
        # Two with a longest sequence must fit in half of them.
        return max(num_tokens, 5 * self.max_len) // BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationFigures:
    """How long users waited for the first tokens of answers, but for the first ones."""

    has_tier: bool
    load: ConversationLoad
    is_complete: bool
    seconds: float
    num_answers: int
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    num_queried_tokens: int
    num_hit_tokens: int
    num_cpu_hit_tokens: int
    num_saved_blocks: int
    num_blocks: int
    num_cpu_blocks: int
    start_s: float
    pin_s: float


def run_conversations(
    engine: MeasuredEngine, load: ConversationLoad, *, has_tier: bool, limit_s: float
) -> ConversationFigures:
    """Run all conversations to their ends."""
    draws = random.Random(2)
    engine.submit(_tokens(draws, load.max_len // 2), 4)
    engine.wait(600.0)
    shared = _tokens(draws, load.num_shared_tokens)
    prompts = [list(shared) for _ in range(load.num_conversations)]
    started_s = time.perf_counter()
    # The next messages, by time; the first ones arrive within a mean time to think.
    due = [(started_s + draws.random() * load.think_s, number) for number in range(len(prompts))]
    heapq.heapify(due)
    num_sent = [0] * len(prompts)
    answering: dict[int, Reply] = {}
    ttft_s: list[float] = []
    while (due or answering) and time.perf_counter() - started_s < limit_s:
        while due and due[0][0] <= time.perf_counter():
            _, number = heapq.heappop(due)
            prompts[number] += _tokens(draws, load.num_message_tokens)
            num_sent[number] += 1
            answering[number] = engine.submit(prompts[number], load.num_answer_tokens)
        for number, reply in list(answering.items()):
            if not reply.ended_s:
                continue
            del answering[number]
            if num_sent[number] > 1:
                ttft_s.append(reply.ttft_s)
            if num_sent[number] < load.num_turns:
                prompts[number] += reply.token_ids
                wait_s = draws.expovariate(1 / load.think_s)
                heapq.heappush(due, (reply.ended_s + wait_s, number))
        time.sleep(_POLL_S)
    seconds = time.perf_counter() - started_s
    stats = engine.stats()
    engine.abort_all()
    ttft_s.sort()
    return ConversationFigures(
        has_tier=has_tier,
        load=load,
        is_complete=not (due or answering),
        seconds=round(seconds, 2),
        num_answers=len(ttft_s),
        mean_ttft_ms=round(statistics.fmean(ttft_s) * 1e3, 1) if ttft_s else 0.0,
        median_ttft_ms=round(statistics.median(ttft_s) * 1e3, 1) if ttft_s else 0.0,
        p99_ttft_ms=round(ttft_s[len(ttft_s) * 99 // 100] * 1e3, 1) if ttft_s else 0.0,
        num_queried_tokens=stats.num_queried_tokens,
        num_hit_tokens=stats.num_hit_tokens,
        num_cpu_hit_tokens=stats.num_cpu_hit_tokens,
        num_saved_blocks=stats.num_saved_blocks,
        num_blocks=stats.num_blocks,
        num_cpu_blocks=stats.num_cpu_blocks,
        start_s=round(engine.start_s, 2),
        pin_s=round(engine.pin_s, 2),
    )


def _tokens(draws: random.Random, number: int) -> list[int]:
    return draws.choices(range(2, MAX_TOKEN_ID), k=number)
