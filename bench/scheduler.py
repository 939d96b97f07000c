"""The scheduler where much waits: its time per step, and what its policy gives in virtual time.

    python -m bench.scheduler

For its own time, ranks are not simulated: each plan gets its output at once. For the policy, steps
take the time that `bench/virtual_time.py` gives them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench.virtual_cases import (
    FLOODS,
    FULL_STEP_S,
    WORKLOADS,
    first_token_times,
    throughput_of_pool,
    throughput_of_preemption,
    wait_behind_large,
)
from bench.virtual_conversations import ConversationShape, run_conversations
from cluster.scheduling.queues.fair_queue import FairQueue, Share
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.config import SchedulerConfig
from pagedray.request import Request, SamplingParams

BLOCK_SIZE = 16
NUM_ROWS = 64
NUM_PROMPT_TOKENS = 127_000
NUM_WAITING = 100_000
NUM_STEPS = 200


class Steps:
    """A scheduler, its requests and their steps."""

    def __init__(self, *, num_blocks: int) -> None:
        self.scheduler = Scheduler(
            config=SchedulerConfig(
                max_num_seqs=NUM_ROWS,
                max_num_batched_tokens=8192,
                max_queued_requests=10**6,
                max_queued_tokens=10**9,
            ),
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_cpu_blocks=0,
            max_model_len=2 * NUM_PROMPT_TOKENS,
            enable_prefix_cache=True,
            enable_cpu_prefix_cache=False,
        )
        self._numbers = itertools.count()

    def add(self, prompt: tuple[int, ...], *, tenant: str = "", max_tokens: int = 1) -> None:
        """Queue a request."""
        self.scheduler.add_request(self.make_request(prompt, tenant=tenant, max_tokens=max_tokens))

    def make_request(
        self, prompt: tuple[int, ...], *, tenant: str = "", max_tokens: int = 1
    ) -> Request:
        """Return a request with an id and a seed of its own."""
        number = next(self._numbers)
        return Request(
            id=f"{number:032x}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            seed=number,
            tenant=tenant,
        )

    def run(self) -> None:
        """Make a plan and apply its output."""
        plan = self.scheduler.schedule()
        assert plan is not None
        num_sampled = plan.num_sampled
        self.scheduler.update(StepOutput(plan.step, [7] * num_sampled))
        self.scheduler.acknowledge(plan.step)


def main() -> int:
    """Measure each case and print a table."""
    parser = argparse.ArgumentParser(description="Time of the scheduler where much waits.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| case | median ms |")
    print("| --- | ---: |")
    cases = [
        *(
            (f"64 starts and ends, {number} tenants", _tenant_times(number))
            for number in (100, 1000, 10_000)
        ),
        ("of which: 64 look-ups, removals, charges and insertions, 10000 tenants", _lookup_times()),
        ("a step while a cached prompt of 127 000 tokens waits", _waiting_times()),
        ("queueing and starting a cached prompt of 127 000", _start_times(is_prepared=False)),
        ("of which under the lock", _start_times(is_prepared=True)),
        ("stats with 100 000 waiting requests", _stats_times()),
    ]
    for case, times in cases:
        median = statistics.median(times)
        print(f"| {case} | {median * 1e3:.3f} |")
        rows.append({"case": case, "median_ms": median * 1e3})
    policy = _policy_results() | _fork_figures()
    print("\n| policy, in virtual time | result |")
    print("| --- | ---: |")
    for case, result in policy.items():
        print(f"| {case} | {result:.3f} |")
    if options.output:
        report = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "rows": rows,
            "policy": policy,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _policy_results() -> dict[str, float]:
    """Return steps, ratios of throughputs and times to first token, by case."""
    alone, _ = wait_behind_large(num_newcomers=0)
    large, newcomers = wait_behind_large(num_newcomers=300)
    results = {
        "steps that newcomers wait behind a sequence that finds no room, at most": max(
            float(call.num_steps_to_first_token) for call in newcomers
        ),
        "steps by which they delay it": float(large.start_step - alone.start_step),
    }
    for has_limit in (True, False):
        fitting = throughput_of_pool(1.1, has_limit=has_limit)
        name = "with" if has_limit else "without"
        results[f"throughput of a pool 10 % too small, {name} max_tokens"] = (
            throughput_of_pool(0.9, has_limit=has_limit) / fitting
        )
    for workload in WORKLOADS:
        swapped, recomputed, chosen = (
            throughput_of_preemption(workload, preemption)
            for preemption in ("swap", "recompute", "auto")
        )
        results[f"{workload}: recompute, tokens per second"] = recomputed
        results[f"{workload}: swap relative to recompute"] = swapped / recomputed
        results[f"{workload}: auto relative to the better one"] = chosen / max(swapped, recomputed)
    without, with_tier = (
        run_conversations(ConversationShape(), enable_cpu_prefix_cache=has_tier)
        for has_tier in (False, True)
    )
    name = "64 conversations of twice the device pool: mean time to first token"
    results[f"{name} without the CPU prefix cache, s"] = without.mean_ttft_s
    results[f"{name} with it, s"] = with_tier.mean_ttft_s
    results["its p99 without the cache, s"] = _p99(without.ttft_s)
    results["its p99 with it, s"] = _p99(with_tier.ttft_s)
    results[f"{name} with it, relative"] = with_tier.mean_ttft_s / without.mean_ttft_s
    none_s = _p99(first_token_times("none", duration_s=100.0))
    results["a light tenant's p99 of time to first token, alone, s"] = none_s
    results["its bound beside a flood, s"] = 1.5 * none_s + 2 * FULL_STEP_S
    for flood in FLOODS:
        results[f"beside a flood: {flood}, s"] = _p99(first_token_times(flood, duration_s=100.0))
    return results


def _p99(times: list[float]) -> float:
    """Return the 99th percentile of sorted times."""
    return times[len(times) * 99 // 100]


def _tenant_times(num_tenants: int) -> list[float]:
    """Return the times of steps that start and end 64 requests of waiting tenants."""
    steps = Steps(num_blocks=1024)
    tenants = itertools.cycle([f"tenant {number}" for number in range(num_tenants)])
    prompt = tuple(range(8))
    for _ in range(2 * num_tenants):
        steps.add(prompt, tenant=next(tenants))
    times = []
    for _ in range(NUM_STEPS // 4):
        began_s = time.perf_counter()
        steps.run()
        times.append(time.perf_counter() - began_s)
        assert steps.scheduler.num_running == 0
        for _ in range(NUM_ROWS):
            steps.add(prompt, tenant=next(tenants))
    return times


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """An item of a fair queue."""

    order: tuple[int, ...]
    share: Share[_Item]


def _lookup_times() -> list[float]:
    """Return the times of 64 turns of a fair queue of 10 000 tenants."""
    queue = FairQueue[_Item]()
    for number in range(10_000):
        queue.insert(_Item((number,), queue.open_share(f"tenant {number}")))
    times = []
    numbers = itertools.count(10_000)
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        for _ in range(NUM_ROWS):
            item = queue.first
            queue.remove(item)
            queue.charge(item.share, 17)
            queue.insert(_Item((next(numbers),), item.share))
        times.append(time.perf_counter() - began_s)
    return times


def _waiting_times() -> list[float]:
    """Return the times of steps with one running request, and no room for the next one."""
    num_blocks = NUM_PROMPT_TOKENS // BLOCK_SIZE
    steps = Steps(num_blocks=num_blocks + 4)
    prompt = tuple(range(NUM_PROMPT_TOKENS))
    steps.add(prompt)
    while steps.scheduler.num_open:
        steps.run()
    steps.add((1,) * 8 * BLOCK_SIZE, max_tokens=NUM_STEPS + 1)
    steps.run()
    steps.add(prompt)
    times = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        steps.run()
        times.append(time.perf_counter() - began_s)
        assert steps.scheduler.num_waiting == 1
    return times


def _start_times(*, is_prepared: bool) -> list[float]:
    """Return the times to queue a long prompt, which is cached, and to make its first step."""
    times = []
    for number in range(10):
        steps = Steps(num_blocks=NUM_PROMPT_TOKENS // BLOCK_SIZE + 4)
        prompt = tuple(range(number, number + NUM_PROMPT_TOKENS))
        steps.add(prompt)
        while steps.scheduler.num_open:
            steps.run()
        request = steps.make_request(prompt)
        prepared = steps.scheduler.prepare_prompt(request) if is_prepared else None
        began_s = time.perf_counter()
        steps.scheduler.add_request(request, prepared)
        steps.run()
        times.append(time.perf_counter() - began_s)
    return times


def _fork_figures() -> dict[str, float]:
    """Return what 128 completions of a prompt of 131 072 tokens cost."""
    num_tokens, n = 131_072, 128
    scheduler = Scheduler(
        config=SchedulerConfig(
            max_num_seqs=n, max_num_batched_tokens=num_tokens, max_queued_tokens=10**9
        ),
        block_size=BLOCK_SIZE,
        num_blocks=2 * num_tokens // BLOCK_SIZE,
        num_cpu_blocks=0,
        max_model_len=num_tokens + 100,
        enable_prefix_cache=True,
        enable_cpu_prefix_cache=False,
    )
    request = Request(
        id="a",
        prompt_token_ids=tuple(range(1000, 1000 + num_tokens)),
        sampling=SamplingParams(n=n, max_tokens=50, ignore_eos=True, temperature=0.0),
        seed=0,
    )
    add_times = []
    for _ in range(20):
        prepared = scheduler.prepare_prompt(request)
        began_s = time.perf_counter()
        scheduler.add_request(request, prepared)
        add_times.append(time.perf_counter() - began_s)
        scheduler.abort_request(request.id)
    tracemalloc.start()
    scheduler.add_request(request)
    num_bytes = 0
    while scheduler.num_running < n:
        plan = scheduler.schedule()
        assert plan is not None
        num_bytes = max(num_bytes, len(msgspec.msgpack.encode(plan)))
        num_sampled = plan.num_sampled
        scheduler.update(StepOutput(plan.step, [7] * num_sampled))
        scheduler.acknowledge(plan.step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "n = 128 of a prompt of 131 072 tokens: add, ms": statistics.median(add_times) * 1e3,
        "its peak memory, MB": peak / 1e6,
        "its largest plan, MB": num_bytes / 1e6,
    }


def _stats_times() -> list[float]:
    steps = Steps(num_blocks=1024)
    for _ in range(NUM_WAITING):
        steps.add((1, 2, 3))
    times = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        steps.scheduler.stats()
        times.append(time.perf_counter() - began_s)
    return times


if __name__ == "__main__":
    sys.exit(main())
