"""Microseconds of choosing tokens on a GPU: our kernels beside torch, over rows and filters.

    python -m bench.choice --output choice.json

Scores are bfloat16, `[rows, vocabulary]`: flat ones as of a model with random weights, and peaked
ones as of a trained model. A call is timed by CUDA events behind a long kernel, so that launches
are not, and the time is the median. Tokens are compared with those of the CPU (`equal` counts equal
rows). The floor is one read of the scores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from torch.profiler import ProfilerActivity, profile

from workers.sampling.choice import Choice, Draws
from workers.sampling.numpy_choice import NumpyChoice
from workers.sampling.torch_choice import TorchChoice
from workers.sampling.triton_choice import TritonChoice
from workers.sampling.uploader import Uploader

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE = 128256
READ_BYTES_PER_S = 4.19e12
REPLAYS = 15
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_k top_p": {"top_k": 50, "top_p": 0.9},
    "top_k 2000": {"top_k": 2000},
    "top_p hot": {"temperature": 2.0, "top_p": 0.99},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    filters: str
    shape: str
    num_rows: int
    ours_us: float
    torch_us: float | None
    floor_us: float
    num_equal: int
    """Rows whose token is that of the CPU."""
    num_torch_equal: int | None
    kernels: dict[str, float]


def make_scores(shape: str, num_rows: int) -> torch.Tensor:
    """Return bfloat16 scores on the device."""
    generator = torch.Generator(device="cuda").manual_seed(num_rows)
    scores = torch.randn(num_rows, VOCAB_SIZE, device="cuda", generator=generator)
    scores = scores * 1.3 if shape == "flat" else scores.sign() * scores.abs().pow(1.5) * 2.0
    return scores.bfloat16()


def make_draws(filters: dict[str, float], num_rows: int) -> Draws:
    """Return draws with other uniforms in each row."""
    return Draws(
        temperature=np.full(num_rows, filters.get("temperature", 1.0)),
        top_k=np.full(num_rows, int(filters.get("top_k", VOCAB_SIZE))),
        top_p=np.full(num_rows, filters.get("top_p", 1.0)),
        min_p=np.full(num_rows, filters.get("min_p", 0.0)),
        uniform=np.random.default_rng(num_rows).random(num_rows),
    )


def chooser(
    choice: Choice, filters: dict[str, float], scores: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a call that chooses a token for each row."""
    indices, draws = np.arange(len(scores)), make_draws(filters, len(scores))
    if not filters:
        return lambda: choice.greedy(scores, indices)
    if filters.keys() == {"temperature"}:
        return lambda: choice.unfiltered(scores, indices, draws)
    return lambda: choice.filtered(scores, indices, draws)


def microseconds(choose: Callable[[], torch.Tensor]) -> float:
    """Return the median time on the device, uploads included."""
    for _ in range(3):
        choose()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(REPLAYS):
        # Longer than the launches take, so that the device never waits for the host.
        torch.cuda._sleep(4_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        choose()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def kernel_times(choose: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Return the microseconds of each kernel of a call."""
    times: dict[str, float] = defaultdict(float)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            choose()
        torch.cuda.synchronize()
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            times[event.name()] += event.duration_ns() / 1e3 / REPLAYS
    return {name: round(time_us, 1) for name, time_us in times.items()}


def measure(name: str, shape: str, num_rows: int, *, with_torch: bool) -> Row:
    """Compare and time one case."""
    filters = FILTERS[name]
    scores = make_scores(shape, num_rows)
    ours = chooser(TritonChoice(Uploader(torch.device("cuda"))), filters, scores)
    theirs = chooser(TorchChoice(), filters, scores)
    expected = chooser(NumpyChoice(), filters, scores.cpu())()
    return Row(
        filters=name,
        shape=shape,
        num_rows=num_rows,
        num_equal=int((ours().cpu() == expected).sum()),
        num_torch_equal=int((theirs().cpu() == expected).sum()) if with_torch else None,
        ours_us=round(microseconds(ours), 1),
        torch_us=round(microseconds(theirs), 1) if with_torch else None,
        kernels=kernel_times(ours),
        floor_us=round(scores.nbytes / READ_BYTES_PER_S * 1e6, 1),
    )


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--filters", nargs="+", choices=FILTERS, default=list(FILTERS))
    parser.add_argument(
        "--shapes", nargs="+", choices=("flat", "peaked"), default=["flat", "peaked"]
    )
    parser.add_argument("--skip-torch", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    started_s = time.perf_counter()
    for shape in arguments.shapes:
        for num_rows in arguments.num_rows:
            for name in arguments.filters:
                row = measure(name, shape, num_rows, with_torch=not arguments.skip_torch)
                rows.append(row)
                print(
                    f"{shape:7} {num_rows:4} rows  {name:12} ours {row.ours_us:9.1f} us  torch "
                    f"{row.torch_us or 0:9.1f} us  floor {row.floor_us:6.1f} us  equal "
                    f"{row.num_equal} (torch {row.num_torch_equal})  "
                    f"{time.perf_counter() - started_s:.0f} s",
                )
                print(*(f"{n[:24]} {t}" for n, t in row.kernels.items()), sep=", ", flush=True)
                if arguments.output:
                    result = {
                        "gpu": torch.cuda.get_device_name(),
                        "torch": torch.__version__,
                        "triton": triton.__version__,
                        "rows": [asdict(row) for row in rows],
                    }
                    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
