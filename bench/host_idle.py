"""How long a device waits for the host during calls of `LLM`, with ranks that only take time.

    python -m bench.host_idle --workload prefix --workload mixed --output host_idle.json

The whole host side runs: prompts are validated, scheduled, encoded as on the step channel, and
tokens become text. The ranks compute nothing. A step takes a constant time and one for each token,
by default about those of a Llama of 8B parameters on two H200, and begins when the one before it
has ended and its plan is there. What a call takes longer than all of its steps is idle: before the
first step, between steps whose plans are late, and after the last one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from bench.controller import InstantExecutor
from bench.engine import SHAPES, save_model, write_results
from cluster.cli.bench.datasets import WORKLOADS
from cluster.engine import open_engine
from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    from cluster.cli.bench.datasets import Workload
    from pagedray.batch import StepOutput, StepPlan

MAX_NUM_SEQS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; seconds of the median call."""

    workload: str
    num_steps: int
    call_s: float
    steps_s: float
    idle_s: float


class TimedExecutor(InstantExecutor):
    """Ranks whose steps take time, one after the other."""

    def __init__(self, *, step_s: float, token_s: float) -> None:
        super().__init__()
        self._step_s = step_s
        self._token_s = token_s
        self._ends: deque[float] = deque()
        self._last_end = 0.0
        self.num_steps = 0
        self.steps_s = 0.0

    def submit_plan(self, plan: StepPlan) -> None:
        super().submit_plan(plan)
        duration_s = self._step_s + plan.num_tokens * self._token_s
        self._last_end = max(self._last_end, time.perf_counter()) + duration_s
        self._ends.append(self._last_end)
        self.num_steps += 1
        self.steps_s += duration_s

    def collect_output(self) -> StepOutput:
        time.sleep(max(self._ends.popleft() - time.perf_counter(), 0.0))
        return super().collect_output()


def main() -> int:
    """Measure, print a table, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable (all)")
    parser.add_argument("--step-ms", type=float, default=4.0, help="of every step (4)")
    parser.add_argument("--token-us", type=float, default=12.0, help="of every token (12)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    executor = TimedExecutor(step_s=options.step_ms / 1e3, token_s=options.token_us / 1e6)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(open_engine, "LocalExecutor", return_value=executor),
    ):
        save_model(Path(folder), SHAPES["llama-8b"])
        with LLM(
            folder,
            executor="local",
            load_format="dummy",
            max_num_seqs=MAX_NUM_SEQS,
            show_progress=False,
        ) as llm:
            for name in options.workload or WORKLOADS:
                calls = [measure(llm, executor, name, seed) for seed in range(options.rounds)]
                rows.append(_median(calls))
                row = rows[-1]
                print(
                    f"{name:8} {row.num_steps:5} steps  call {row.call_s:7.3f} s  steps "
                    f"{row.steps_s:7.3f} s  idle {row.idle_s:6.3f} s",
                    flush=True,
                )
    if options.output is not None:
        write_results(options.output, "llama-8b", rows=rows)
    return 0


def measure(llm: LLM, executor: TimedExecutor, name: str, seed: int) -> Row:
    """Return the times of one call."""
    workload: Workload = WORKLOADS[name]
    requests = workload.requests(llm.vocab_size, seed)
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=one.max_tokens, ignore_eos=True)
        for one in requests
    ]
    executor.num_steps, executor.steps_s = 0, 0.0
    started_s = time.perf_counter()
    llm.generate([one.token_ids for one in requests], sampling, use_tqdm=False)
    call_s = time.perf_counter() - started_s
    return Row(
        workload=name,
        num_steps=executor.num_steps,
        call_s=round(call_s, 4),
        steps_s=round(executor.steps_s, 4),
        idle_s=round(call_s - executor.steps_s, 4),
    )


def _median(calls: list[Row]) -> Row:
    middle = statistics.median_low(one.idle_s for one in calls)
    return next(one for one in calls if one.idle_s == middle)


if __name__ == "__main__":
    sys.exit(main())
