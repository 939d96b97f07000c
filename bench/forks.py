"""Milliseconds of the plans that start the other sequences of a request with a long prompt.

    python -m bench.forks --n 128 --prompt-tokens 131072

The request has `n` sequences, which start once the prompt is computed. The table has the median
and the worst plan: the time to schedule a plan, under the controller's lock, to encode it,
decode it and apply it to the batch of a rank, and to take an output, under the lock again.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import msgspec
import torch

from bench.records.command import command_and_date
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import MAX_PLANS_IN_FLIGHT, Scheduler
from pagedray.batch import ControllerMessage, StepOutput, StepPlan
from pagedray.config import SchedulerConfig
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from workers.runner.input_batch import InputBatch
from workers.runner.model_runner import Prompts
from workers.runner.token_table import TokenTable

_BLOCK_SIZE = 16
_COLUMNS = ("schedule ms", "send and apply ms", "update ms", "sum ms", "KiB", "starts")


def main() -> int:
    """Measure repetitions and print a table of the plans of all."""
    parser = argparse.ArgumentParser(description="Time of plans that start many siblings.")
    parser.add_argument("--n", type=int, default=128, help="sequences (128)")
    parser.add_argument("--prompt-tokens", type=int, default=131072)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    # Other processes may keep a core busy, for which every copy would wait.
    torch.set_num_threads(1)
    plans = [
        plan
        for _ in range(options.repetitions)
        for plan in _measure(options.n, options.prompt_tokens)
    ]
    rows = {
        name: dict(zip(_COLUMNS, map(choose, zip(*plans, strict=True)), strict=True))
        for name, choose in (("median", statistics.median), ("worst", max))
    }
    print("| plan |", " | ".join(_COLUMNS), "|")
    print("| --- |", " | ".join("---:" for _ in _COLUMNS), "|")
    for name, row in rows.items():
        print(f"| {name} |", " | ".join(f"{cell:.2f}" for cell in row.values()), "|")
    if options.output:
        report = {**command_and_date(), "python": platform.python_version(), **rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _measure(n: int, num_tokens: int) -> list[list[float]]:
    """Return the columns of each plan that starts siblings, or whose outputs follow."""
    max_model_len = num_tokens + 256
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=n, max_num_batched_tokens=8192),
        kv=KvOptions(
            block_size=_BLOCK_SIZE,
            num_blocks=max_model_len // _BLOCK_SIZE + 32 * n,
            num_cpu_blocks=0,
        ),
        max_model_len=max_model_len,
    )
    table = TokenTable(
        max_num_rows=n,
        max_model_len=max_model_len,
        max_num_tokens=8192,
        device=torch.device("cpu"),
    )
    for row in range(n):
        # The memory of zeros is allocated when it is written.
        table.tokens(row, 0, max_model_len).fill_(1)
    batch = InputBatch(
        table,
        max_num_rows=n,
        max_model_len=max_model_len,
        block_size=_BLOCK_SIZE,
        replays_decodes=False,
    )
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ControllerMessage)
    request = Request(
        id="r",
        prompt_token_ids=tuple(range(1, num_tokens + 1)),
        sampling=SamplingParams(n=n, max_tokens=100, ignore_eos=True),
        seed=1,
    )
    scheduler.add_request(request, scheduler.prepare_prompt(request))
    prompts = Prompts()
    rows = list[list[float]]()
    num_forked, outputs = 0, list[StepOutput]()
    gc.collect()
    while num_forked < n - 1 or outputs:
        times = [time.perf_counter()]
        plan = scheduler.schedule() if num_forked < n - 1 else None
        times.append(time.perf_counter())
        num_bytes = 0
        if plan is not None:
            message = encoder.encode(plan)
            received = decoder.decode(message)
            assert isinstance(received, StepPlan)
            starts = prompts.complete_starts(received.starts)
            batch.apply_plan(msgspec.structs.replace(received, starts=starts))
            outputs.append(StepOutput(plan.step, [7] * plan.num_sampled))
            num_bytes = len(message)
        times.append(time.perf_counter())
        if plan is None or len(outputs) == MAX_PLANS_IN_FLIGHT:
            output = outputs.pop(0)
            scheduler.update(output)
            scheduler.acknowledge(output.step)
        times.append(time.perf_counter())
        forks = () if plan is None else [one for one in plan.starts if one.donor_row >= 0]
        num_forked += len(forks)
        if num_forked:
            cells = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
            cells = [*cells, sum(cells), num_bytes / 1024, float(len(forks))]
            rows.append(cells)
    return rows


if __name__ == "__main__":
    sys.exit(main())
