"""Where the time of a steady decode step goes: every kernel, the gaps between them, the host.

    python -m bench.account --case 1 --case 256 --case 256-top_p --output account.json

The engine has dummy weights at the shape of Llama 3 8B and its rank runs in a thread of this
process, so that the profiler sees it. A marker kernel of about two microseconds starts each step;
it is not counted as busy. Bytes and FLOP of the GEMMs are computed from their shapes; the share
of the roofline is the larger of both shares. Gaps are named by the kernels before and after them.
Host times are of the rank's thread, measured without the profiler.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partialmethod, wraps
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.account.kernel_rows import Launch, Measurement, account_of, print_account
from bench.engine import MAX_TOKEN_ID, SHAPES, save_model, write_results
from pagedray import LLM, SamplingParams
from workers.runner.decode_graphs import DecodeGraphs
from workers.runner.input_batch import InputBatch
from workers.runner.model_runner import ModelRunner
from workers.sampler import Sampler
from workers.sampling.device_choice import TorchChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_WARM_UP_STEPS = 60
NUM_TIMED_STEPS = 100
NUM_PROFILED_STEPS = 30
TOP_P: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95}  # Any: fields of SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Equal prompts decoded together; the last `num_special` of them sample otherwise."""

    batch_size: int
    special: dict[str, Any] = field(default_factory=dict)  # Any: fields of SamplingParams
    num_special: int = 0

    def sampling(self, index: int, max_tokens: int) -> SamplingParams:
        """Return how the request of this index samples."""
        is_special = index >= self.batch_size - self.num_special
        options = {"temperature": 0.0} | (self.special if is_special else {})
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=index, **options)


CASES = {
    "1": Case(batch_size=1),
    "8": Case(batch_size=8),
    "16": Case(batch_size=16),
    "64": Case(batch_size=64),
    "256": Case(batch_size=256),
    "1-top_p": Case(batch_size=1, special=TOP_P, num_special=1),
    "256-top_p": Case(batch_size=256, special=TOP_P, num_special=256),
    "256-one_top_p": Case(batch_size=256, special=TOP_P, num_special=1),
    "256-logprobs": Case(batch_size=256, special={"logprobs": 5}, num_special=256),
    "256-one_logprobs": Case(batch_size=256, special={"logprobs": 5}, num_special=1),
    "256-random": Case(batch_size=256, special={"temperature": 0.7}, num_special=256),
    "256-penalty": Case(batch_size=256, special={"frequency_penalty": 0.5}, num_special=256),
    "256-one_penalty": Case(batch_size=256, special={"frequency_penalty": 0.5}, num_special=1),
}


class StepClock:
    """Counts the steps of the rank and times the parts of its launches."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._condition = threading.Condition()
        self._times: dict[str, list[float]] = defaultdict(list)
        self.num_steps = 0
        self.is_marking = False
        self.starts: list[float] = []

    def install(self) -> None:
        """Wrap the parts of a launch, in every runner of this process."""
        for owner, part in (
            (InputBatch, InputBatch.prepare_inputs),
            (DecodeGraphs, DecodeGraphs.replay),
            (Sampler, Sampler.sample),
        ):
            setattr(owner, part.__name__, self._timed(part, part.__name__))
        setattr(ModelRunner, "launch", self._counted(ModelRunner.launch))  # noqa: B010

    def reset(self) -> None:
        """Forget all times and count from zero."""
        with self._condition:
            self.num_steps = 0
            self._times.clear()
            self.starts.clear()

    def wait_for(self, num_steps: int) -> None:
        """Return once as many steps were launched since the reset."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.num_steps >= num_steps, timeout=60):
                raise TimeoutError(f"Only {self.num_steps} of {num_steps} steps were launched.")

    def forget_times(self) -> None:
        """Forget all times, but not the count."""
        with self._condition:
            self._times.clear()
            self.starts.clear()

    def percentiles(self) -> dict[str, tuple[float, float]]:
        """Return median and 99th percentile of each part, in microseconds."""
        with self._condition:
            return {
                name: (round(statistics.median(times), 1), round(_percentile(times, 0.99), 1))
                for name, times in self._times.items()
            }

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:  # Any: arguments of the method
            start_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._times[name].append((time.perf_counter() - start_s) * 1e6)

        return timed

    def _counted(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(launch, "launch")

        @wraps(launch)
        def counted(*arguments: Any, **options: Any) -> Any:  # Any: arguments of the method
            if self.is_marking and self._device == "cuda":
                torch.cuda._sleep(1)
            self.starts.append(time.perf_counter())
            pending = timed(*arguments, **options)
            with self._condition:
                self.num_steps += 1
                self._condition.notify_all()
            return pending

        return counted


def main() -> int:
    """Measure every case, print it, and write it if requested."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.account", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable (all of them)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument(
        "--output-tokens",
        type=int,
        default=NUM_WARM_UP_STEPS + NUM_TIMED_STEPS + 400,
        help="of each request, some while the profiler starts and stops (%(default)s)",
    )
    parser.add_argument("--quantization", help="fp8 quantizes the weights (none)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--torch-choice", action="store_true", help="choose tokens by torch")
    options = parser.parse_args()
    if options.torch_choice:
        Sampler.__init__ = partialmethod(Sampler.__init__, choice=TorchChoice())  # type: ignore[method-assign, assignment]  # before any is made
    shape = SHAPES[options.shape]
    clock = StepClock(options.device)
    clock.install()
    accounts = []
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), shape)
        started_s = time.perf_counter()
        with LLM(
            folder,
            executor="local",
            device=options.device,
            load_format="dummy",
            attention_backend=options.backend,
            quantization=options.quantization,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=2048,
            show_progress=False,
        ) as llm:
            print(f"started in {time.perf_counter() - started_s:.1f} s", flush=True)
            if options.device == "cuda":
                # The first start of the profiler takes seconds.
                with profile(activities=[ProfilerActivity.CUDA]):
                    torch.cuda.synchronize()
            (roofline,) = llm.measure_rooflines()
            for name in options.case or CASES:
                load = Load(options.prompt_tokens, options.output_tokens)
                measured = measure_case(name, llm, clock, load, device=options.device)
                accounts.append(
                    account_of(name, measured, shape, roofline, backend=options.backend)
                )
                print_account(accounts[-1])
                if options.output is not None:
                    write_results(options.output, options.shape, accounts=accounts)
    return 0


@dataclass(frozen=True, slots=True)
class Load:
    """The lengths of each request."""

    num_prompt_tokens: int
    num_output_tokens: int


def measure_case(name: str, llm: LLM, clock: StepClock, load: Load, *, device: str) -> Measurement:
    """Decode a case, first without the profiler and then with it."""
    case = CASES[name]
    chance = random.Random(0)
    prompts = [
        [chance.randrange(2, MAX_TOKEN_ID) for _ in range(load.num_prompt_tokens)]
        for _ in range(case.batch_size)
    ]
    # More steps than are profiled, so that the batch is whole while they are.
    length = load.num_output_tokens
    sampling = [case.sampling(index, length) for index in range(case.batch_size)]
    clock.reset()
    errors: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(prompts, sampling, use_tqdm=False)
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=generate)
    thread.start()
    clock.wait_for(NUM_WARM_UP_STEPS)
    clock.forget_times()
    clock.wait_for(NUM_WARM_UP_STEPS + NUM_TIMED_STEPS)
    starts = list(clock.starts)
    host_us = clock.percentiles()
    wall_us = statistics.median(b - a for a, b in pairwise(starts)) * 1e6
    first = clock.num_steps
    launches: list[Launch] = []
    clocks = ""
    if device == "cuda":
        clock.is_marking = True
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            begun = clock.num_steps
            clock.wait_for(begun + NUM_PROFILED_STEPS // 2)
            clocks = gpu_clocks()
            clock.wait_for(max(begun + NUM_PROFILED_STEPS, clock.num_steps + 2))
            torch.cuda.synchronize()
        clock.is_marking = False
        launches = sorted(_launches(profiler), key=lambda one: one.start)
    mean_context = load.num_prompt_tokens + (first + clock.num_steps) / 2
    thread.join()
    if errors:
        raise errors[0]
    return Measurement(
        batch_size=case.batch_size,
        wall_us=wall_us,
        wall_context=load.num_prompt_tokens + NUM_WARM_UP_STEPS + NUM_TIMED_STEPS // 2,
        mean_context=mean_context,
        host_us=host_us,
        clocks=clocks,
        launches=launches,
    )


def gpu_clocks() -> str:
    """Return SM clock, power and temperature, or an empty string without nvidia-smi."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    try:
        return subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def _launches(profiler: Any) -> Iterator[Launch]:  # Any: torch's profiler has no types here
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            start = event.start_ns()
            yield Launch(event.name(), start, start + event.duration_ns())


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    sys.exit(main())
