"""What `pagedray simulate` predicts for runs that were measured on an H200, and for long prompts.

    python -m bench.simulation --output bench/results/simulation.json

The costs of steps are those of `LLAMA_8B_H200`; workloads and measured figures are those of
`bench/engine/`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from bench.engine import WORKLOADS, Workload
from bench.records.command import command_and_date
from bench.scheduler.cases import decodes_beside_prompt
from cluster.scheduling.kv_manager import KvOptions
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualReplica, distinct_prompt
from pagedray.config import SchedulerConfig

__all__ = ["MEASURED", "measured_figure", "simulated_figure"]

_RESULTS = Path(__file__).parent / "results" / "engine_hybrid.json"
MEASURED = [one for one in WORKLOADS["llama-8b"] if one.name not in ("sampled", "prefix")]
"""Workloads with measured times on one H200."""
_MIXED = 10_989.0
"""Of one GPU, in the table "CUDA graphs for steps with prompts" of docs/optimizations.md."""


def main() -> int:
    """Print measured and simulated figures."""
    parser = argparse.ArgumentParser(description="Predictions beside measured runs.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| workload | measured | simulated | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for workload in MEASURED:
        measured, simulated = measured_figure(workload), simulated_figure(workload)
        name = f"{workload.name}, {workload.num_requests}"
        print(f"| {name} | {measured:,.2f} | {simulated:,.2f} | {simulated / measured:.3f} |")
        rows.append({"workload": name, "measured": measured, "simulated": simulated})
    paced = []
    print("\n| target of time between tokens, ms | p99, ms | the prompt's time to first token, s |")
    print("| --- | ---: | ---: |")
    for target_ms in (None, 15.0, 25.0, 50.0):
        times, ttft_s = decodes_beside_prompt(itl_target_ms=target_ms)
        p99_ms = times[len(times) * 99 // 100] * 1e3
        print(f"| {target_ms} | {p99_ms:.1f} | {ttft_s:.2f} |")
        paced.append({"itl_target_ms": target_ms, "p99_itl_ms": p99_ms, "ttft_s": ttft_s})
    if options.output:
        report = {
            **command_and_date(),
            "python": platform.python_version(),
            "rows": rows,
            "beside_prompt_of_128000": paced,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measured_figure(workload: Workload) -> float:
    """Return what one H200 reached: milliseconds per token, or tokens per second."""
    if workload.name == "mixed":
        return _MIXED
    rows = json.loads(_RESULTS.read_text())["rows"]
    return next(
        float(row["figure"])
        for row in rows
        if row["workload"]["name"] == workload.name
        and row["workload"]["num_requests"] == workload.num_requests
    )


def simulated_figure(workload: Workload) -> float:
    """Return the same in virtual time, with the configuration of `bench/engine/`."""
    replica = VirtualReplica(
        SchedulerConfig(
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_queued_requests=workload.num_requests,
            max_queued_tokens=10**9,
        ),
        KvOptions(block_size=16, num_blocks=50_000, num_cpu_blocks=512, enable_prefix_cache=False),
        LLAMA_8B_H200,
        max_model_len=8192,
    )
    for number, (num_prompt_tokens, num_new_tokens) in enumerate(workload.lengths()):
        replica.submit(distinct_prompt(number, num_prompt_tokens), num_output_tokens=num_new_tokens)
    replica.run()
    return workload.figure(replica.now_s)


if __name__ == "__main__":
    sys.exit(main())
