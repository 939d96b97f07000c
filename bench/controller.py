"""Milliseconds per step of the controller and the scheduler, with ranks that take no time.

    python -m bench.controller --sequences 64 --sequences 256

The controller and the scheduler serve requests over an executor that answers immediately. The
result is the wall time of a steady decode step: schedule, encode and decode the plan as the step
channel does, take the output, update, record finished requests, publish.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bench.records.command import command_and_date
from cluster.engine.engine_loop import EngineLoop
from cluster.engine.executor import Executor, RankHealth
from pagedray.batch import ControllerMessage, StepOutput, StepPlan, WorkerMessage
from pagedray.config import CacheConfig, CacheSize, EngineConfig, KernelReport, SchedulerConfig
from pagedray.model_config import ModelConfig
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import DiskReport, StepMasks
    from pagedray.errors import EngineError

CONTEXT = 500
STEPS = 400


class SimulatedRanks(Executor):
    """Ranks of a decoder without layers, which never die."""

    def __init__(self) -> None:
        self._step = -1

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(num_blocks=65536, num_cpu_blocks=1024, block_bytes=0)

    @property
    def kernels(self) -> KernelReport:
        return KernelReport("none", {})

    def poll_ranks(self) -> tuple[int, Sequence[DiskReport]]:
        return self._step, ()

    def send_masks(self, masks: StepMasks) -> None:
        raise AssertionError("No sequence has a structure.")

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth()

    def restart_ranks(self) -> bool:
        raise AssertionError("These ranks do not die.")


class InstantExecutor(SimulatedRanks):
    """Ranks that sample a token without computing; messages are encoded as on the step channel."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: deque[StepOutput] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._plans: msgspec.msgpack.Decoder[ControllerMessage] = msgspec.msgpack.Decoder(
            ControllerMessage
        )
        self._answers: msgspec.msgpack.Decoder[WorkerMessage] = msgspec.msgpack.Decoder(
            WorkerMessage
        )
        self.decode_times: list[tuple[float, int]] = []
        """The time at which each step was collected, and how many sequences it sampled."""

    def submit_plan(self, plan: StepPlan) -> None:
        received = self._plans.decode(self._encoder.encode(plan))
        assert isinstance(received, StepPlan)
        answer = self._encoder.encode(StepOutput(received.step, [7] * received.num_sampled))
        output = self._answers.decode(answer)
        assert isinstance(output, StepOutput)
        self._outputs.append(output)

    def collect_output(self) -> StepOutput:
        output = self._outputs.popleft()
        self._step = output.step
        self.decode_times.append((time.perf_counter(), len(output.token_ids)))
        return output

    def close(self) -> None:
        self._outputs.clear()


class CountingSink:
    """Counts ends."""

    def __init__(self, num_sequences: int) -> None:
        self._left = num_sequences
        self.is_done = threading.Event()

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Take the events of one step."""
        self._left -= sum(event.finish_reason is not None for event in events)
        if self._left == 0:
            self.is_done.set()

    def fail_all(self, error: EngineError) -> None:
        """End the wait."""
        self.is_done.set()


def main() -> int:
    """Measure each number of sequences and print a table."""
    parser = argparse.ArgumentParser(
        description="Time per step of the controller and the scheduler."
    )
    parser.add_argument("--sequences", type=int, action="append")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| running sequences | median ms | p90 ms |")
    print("| ---: | ---: | ---: |")
    for num_sequences in options.sequences or [1, 64, 256, 1024]:
        times = sorted(_step_times(num_sequences))
        median, p90 = statistics.median(times), times[len(times) * 9 // 10]
        print(f"| {num_sequences} | {median * 1e3:.3f} | {p90 * 1e3:.3f} |")
        rows.append({"sequences": num_sequences, "median_ms": median * 1e3, "p90_ms": p90 * 1e3})
    if options.output:
        report = {
            **command_and_date(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _step_times(num_sequences: int) -> list[float]:
    executor, sink = InstantExecutor(), CountingSink(num_sequences)
    config = simulated_config(vocab_size=32000, max_num_seqs=num_sequences, max_positions=2048)
    controller = EngineLoop(config, executor, sink)
    for index in range(num_sequences):
        controller.submit_request(
            Request(
                id=f"{index:032x}",
                prompt_token_ids=tuple(range(index, index + CONTEXT)),
                sampling=SamplingParams(max_tokens=STEPS, ignore_eos=True, temperature=0.0),
                seed=index,
            )
        )
    controller.start_steps()
    sink.is_done.wait(120.0)
    controller.stop_steps()
    steady = [when for when, sampled in executor.decode_times if sampled == num_sequences]
    return [after - before for before, after in itertools.pairwise(steady)]


def simulated_config(*, vocab_size: int, max_num_seqs: int, max_positions: int) -> EngineConfig:
    """Return the configuration of an engine with simulated ranks."""
    model = ModelConfig(
        name="none",
        folder=Path(),
        architecture="none",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=64,
        max_positions=max_positions,
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
    )


if __name__ == "__main__":
    sys.exit(main())
