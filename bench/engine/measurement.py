"""One engine, measured in a process of its own.

A spawned process finds functions here: those of `__main__.py` in a package cannot be sent to it.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine.shapes import SHAPES, save_model
from bench.engine.workloads import WORKLOADS, Workload
from pagedray import LLM, SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["Row", "measure_engine"]

_BLOCK_SIZE = 16
_DEFAULTS = ("latency", "throughput", "mixed", "prefill")
_CAPTURES_S = 4.0
"""How long the idle engine has to capture its graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    backend: str
    executor: str
    num_ranks: int
    workload: Workload
    unit: str
    figure: float
    """The best round."""
    median: float
    start_s: float
    """Seconds until the engine accepts requests."""
    num_cache_tokens: int
    """Tokens for which the KV cache has room."""


def measure_engine(
    options: argparse.Namespace, backend: str, executor: str, send: Callable[[Row], None]
) -> None:
    """Send a row after each workload."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), SHAPES[options.shape])
        started_s = time.perf_counter()
        with LLM(
            folder,
            executor=executor,  # type: ignore[arg-type]  # one of its values
            load_format="dummy",
            attention_backend=backend,
            tensor_parallel_size=options.num_ranks,
            enable_expert_parallel=options.expert_parallel,
            all_reduce=options.all_reduce,
            quantization=options.quantization,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=8192,
            block_size=_BLOCK_SIZE,
            enable_prefix_cache=options.prefix_cache,
            show_progress=False,
            max_graph_tokens=options.max_graph_tokens,
        ) as llm:
            start_s = time.perf_counter() - started_s
            time.sleep(_CAPTURES_S)
            num_cache_tokens = llm.stats().scheduler.num_blocks * _BLOCK_SIZE
            for workload in WORKLOADS[options.shape]:
                if workload.name not in (options.workload or _DEFAULTS):
                    continue
                # The first call compiles kernels and allocates buffers.
                _seconds(llm, workload, seed=0, max_new_tokens=16)
                times = [_seconds(llm, workload, seed=1 + one) for one in range(options.rounds)]
                row = Row(
                    backend=backend,
                    executor=executor,
                    num_ranks=options.num_ranks,
                    workload=workload,
                    unit="ms/token" if workload.name == "latency" else "tokens/s",
                    figure=round(workload.figure(min(times)), 3),
                    median=round(workload.figure(statistics.median(times)), 3),
                    start_s=round(start_s, 1),
                    num_cache_tokens=num_cache_tokens,
                )
                _print(row)
                send(row)


def _seconds(
    llm: LLM, workload: Workload, *, seed: int, max_new_tokens: int | None = None
) -> float:
    """Return the time of a call. Prompts of other seeds or workloads share no cached block."""
    chance = random.Random(f"{workload} {seed}")
    prompts = workload.prompts(chance)
    sizes = [min(size, max_new_tokens or size) for _, size in workload.lengths()]
    sampling = [
        SamplingParams(max_tokens=size, temperature=workload.temperature, ignore_eos=True)
        for size in sizes
    ]
    started_s = time.perf_counter()
    generations = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started_s
    assert [len(one.outputs[0].token_ids) for one in generations] == sizes
    return seconds


def _print(row: Row) -> None:
    load = row.workload
    prompt = load.num_prefix_tokens + statistics.mean(prompt for prompt, _ in load.lengths())
    new = statistics.mean(new for _, new in load.lengths())
    print(
        f"{row.backend:12} {row.executor:6} {load.name:10} {load.num_requests:4} x "
        f"{prompt:5.0f} -> {new:4.0f}  {row.figure:12,.2f} {row.unit}",
        flush=True,
    )
