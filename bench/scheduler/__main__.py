"""The scheduler where much waits: its time per step, and what its policy gives in virtual time.

    python -m bench.scheduler

For its own time, ranks are not simulated: each plan gets its output at once. For the policy, steps
take the time that `bench/scheduler/replica.py` gives them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from pathlib import Path

from bench.records.command import command_and_date
from bench.scheduler.cases import (
    FLOODS,
    FULL_STEP_S,
    WORKLOADS,
    first_token_times,
    throughput_of_pool,
    throughput_of_preemption,
    wait_behind_large,
)
from bench.scheduler.conversations import ConversationShape, run_conversations
from bench.scheduler.step_times import (
    fork_figures,
    lookup_times,
    start_times,
    stats_times,
    tenant_times,
    waiting_times,
)


def main() -> int:
    """Measure each case and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.scheduler", description="Time of the scheduler where much waits."
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| case | median ms |")
    print("| --- | ---: |")
    cases = [
        *(
            (f"64 starts and ends, {number} tenants", tenant_times(number))
            for number in (100, 1000, 10_000)
        ),
        ("of which: 64 look-ups, removals, charges and insertions, 10000 tenants", lookup_times()),
        ("a step while a cached prompt of 127 000 tokens waits", waiting_times()),
        ("queueing and starting a cached prompt of 127 000", start_times(is_prepared=False)),
        ("of which under the lock", start_times(is_prepared=True)),
        ("stats with 100 000 waiting requests", stats_times()),
    ]
    for case, times in cases:
        median = statistics.median(times)
        print(f"| {case} | {median * 1e3:.3f} |")
        rows.append({"case": case, "median_ms": median * 1e3})
    policy = _policy_results() | fork_figures()
    print("\n| policy, in virtual time | result |")
    print("| --- | ---: |")
    for case, result in policy.items():
        print(f"| {case} | {result:.3f} |")
    if options.output:
        report = {
            **command_and_date(),
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


if __name__ == "__main__":
    sys.exit(main())
