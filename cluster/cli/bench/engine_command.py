"""`pagedray bench latency` and `throughput`: an engine in this process, without a server."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.cli.bench.datasets import RandomLengths
from cluster.cli.bench.engine_flags import DEFAULT_NUM_PROMPTS, LENGTH_FLAGS
from cluster.cli.bench.roofline import (
    MeasuredRun,
    RooflineShare,
    SequenceLengths,
    UnknownRoofline,
    share_of_roofline,
)
from cluster.cli.bench.workloads import WORKLOADS, uniform_workload
from cluster.cli.text_llm import TextLLM
from cluster.engine.options.engine_options import default_device
from pagedray.errors import DeviceError, StartupError
from pagedray.sampling_params import SamplingParams
from pagedray.text import pluralize
from pagedray.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from cluster.cli.bench.workloads import EngineRequest, Workload
    from cluster.engine.options.engine_options import EngineOptions
    from cluster.engine.stats import EngineStats
    from cluster.llm.llm import LLM

__all__ = ["bench_latency", "bench_throughput"]

_PERCENTILES = (10, 25, 50, 75, 90, 99)
_WARM_UP_TOKENS = 16
_CAPTURES_S = 4.0
"""How long an idle GPU has to capture the graphs that the warm-up did not need."""


@dataclass(frozen=True, slots=True)
class _Generated:
    """How long a call took, and the lengths of its requests."""

    seconds: float
    requests: tuple[SequenceLengths, ...]


def bench_latency(parsed: argparse.Namespace, options: EngineOptions) -> int:
    """Generate a batch again and again, and print how long it takes. Raises PagedRayError."""
    lengths = RandomLengths(input_len=parsed.input_len, output_len=parsed.output_len)
    workload = uniform_workload(parsed.batch_size, lengths)
    num_warm_ups = parsed.num_iters_warmup
    latencies_s = []
    with _engine(parsed, options) as llm:
        for index in range(num_warm_ups + parsed.num_iters):
            # Other prompts each time, since the last prompts are cached.
            requests = workload.requests(llm.vocab_size, parsed.seed + 2 * index)
            if index == num_warm_ups:
                before = llm.stats()
            generated = _generate(llm, requests, has_bar=False)
            if index >= num_warm_ups:
                latencies_s.append(generated.seconds)
        num_steps = (llm.stats().num_steps - before.num_steps) / parsed.num_iters
        median_s = statistics.median(latencies_s)
        # All batches have the same lengths.
        roofline = _roofline(llm, replace(generated, seconds=median_s), num_steps)
    percentiles = {str(one): float(np.percentile(latencies_s, one)) for one in _PERCENTILES}
    mean_s = statistics.fmean(latencies_s)
    figures: dict[str, object] = {
        "input_len": parsed.input_len,
        "output_len": parsed.output_len,
        "batch_size": parsed.batch_size,
        "avg_latency": mean_s,
        "latencies": latencies_s,
        "percentiles": percentiles,
        "ms_per_token": percentiles["50"] / parsed.output_len * 1e3,
        "output_tokens_per_second": parsed.batch_size * parsed.output_len / percentiles["50"],
        "roofline": roofline.figures(),
    }
    rows = {
        "Batches": str(len(latencies_s)),
        "Mean (s)": f"{mean_s:.4f}",
        **{f"p{name} (s)": f"{value:.4f}" for name, value in percentiles.items()},
        "Median per output token (ms)": f"{figures['ms_per_token']:.3f}",
        "Output tokens per second (median)": f"{figures['output_tokens_per_second']:.2f}",
        **roofline.rows(),
    }
    return _report(parsed, options, figures, rows)


def bench_throughput(parsed: argparse.Namespace, options: EngineOptions) -> int:
    """Run many requests at once, and print tokens per second. Raises PagedRayError."""
    workload = _workload(parsed)
    with _engine(parsed, options) as llm:
        warm_up = workload.requests(llm.vocab_size, parsed.seed + 2)
        _generate(llm, warm_up, has_bar=False, most_tokens=_WARM_UP_TOKENS)
        if (options.device or default_device()) == "cuda":
            time.sleep(_CAPTURES_S)
        requests = workload.requests(llm.vocab_size, parsed.seed)
        before = llm.stats()
        generated = _generate(llm, requests, has_bar=not (parsed.disable_tqdm or parsed.json))
        after = llm.stats()
        num_steps = after.num_steps - before.num_steps
        num_preemptions = _num_preemptions(after) - _num_preemptions(before)
        roofline = _roofline(llm, generated, num_steps)
    seconds = generated.seconds
    num_prompt = sum(len(request.token_ids) for request in requests)
    num_output = sum(request.max_tokens for request in requests)
    figures: dict[str, object] = {
        "workload": parsed.workload or "random",
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": num_prompt + num_output,
        "total_prompt_tokens": num_prompt,
        "total_output_tokens": num_output,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (num_prompt + num_output) / seconds,
        "prompt_tokens_per_second": num_prompt / seconds,
        "output_tokens_per_second": num_output / seconds,
        "steps": num_steps,
        "prefix_hit_tokens": after.scheduler.num_hit_tokens - before.scheduler.num_hit_tokens,
        "preemptions": num_preemptions,
        "roofline": roofline.figures(),
    }
    rows = {
        "Requests": str(len(requests)),
        "Duration (s)": f"{seconds:.2f}",
        "Prompt tokens": f"{num_prompt}, {figures['prefix_hit_tokens']} of them cached",
        "Output tokens": str(num_output),
        "Steps": f"{figures['steps']}, {pluralize(num_preemptions, 'preemption')}",
        "Requests per second": f"{figures['requests_per_second']:.2f}",
        "Prompt tokens per second": f"{figures['prompt_tokens_per_second']:.2f}",
        "Output tokens per second": f"{figures['output_tokens_per_second']:.2f}",
        "Tokens per second": f"{figures['tokens_per_second']:.2f}",
        **roofline.rows(),
    }
    return _report(parsed, options, figures, rows)


def _workload(parsed: argparse.Namespace) -> Workload:
    given = {name: getattr(parsed, name) for name in LENGTH_FLAGS}
    given |= {"num_prompts": parsed.num_prompts, "random_range_ratio": parsed.random_range_ratio}
    if parsed.workload is not None:
        for name, value in given.items():
            if value is not None:
                raise StartupError(
                    f"--{name.replace('_', '-')} cannot be used with --workload, which sets it."
                )
        return WORKLOADS[parsed.workload]
    lengths = {
        name: default if given[name] is None else given[name]
        for name, (default, _) in LENGTH_FLAGS.items()
    }
    ratio = parsed.random_range_ratio or 0.0
    return uniform_workload(
        parsed.num_prompts or DEFAULT_NUM_PROMPTS, RandomLengths(**lengths, range_ratio=ratio)
    )


def _engine(parsed: argparse.Namespace, options: EngineOptions) -> LLM:
    file = parsed.output_json
    if file is not None and not file.parent.is_dir():
        raise StartupError(f"--output-json {file} is in a folder that does not exist.")
    return TextLLM(parsed.model, show_progress=not parsed.json, **asdict(options))


def _num_preemptions(stats: EngineStats) -> int:
    return stats.scheduler.num_swap_preemptions + stats.scheduler.num_recompute_preemptions


def _generate(
    llm: LLM, requests: Sequence[EngineRequest], *, has_bar: bool, most_tokens: int | None = None
) -> _Generated:
    """Generate all requests greedily and to their full lengths."""
    sampling = [
        SamplingParams(
            temperature=0.0,
            max_tokens=min(request.max_tokens, most_tokens or request.max_tokens),
            ignore_eos=True,
        )
        for request in requests
    ]
    started_s = time.perf_counter()
    prompts = [request.token_ids for request in requests]
    generations = llm.generate(prompts, sampling, use_tqdm=has_bar)
    seconds = time.perf_counter() - started_s
    return _Generated(
        seconds,
        tuple(
            SequenceLengths(
                num_prompt=len(one.prompt_token_ids),
                num_cached=one.num_cached_tokens,
                num_output=len(one.outputs[0].token_ids),
            )
            for one in generations
        ),
    )


def _roofline(llm: LLM, generated: _Generated, num_steps: float) -> RooflineShare | UnknownRoofline:
    run = MeasuredRun(
        seconds=generated.seconds,
        num_steps=num_steps,
        requests=generated.requests,
        max_step_tokens=llm.stats().scheduler.max_num_batched_tokens,
    )
    try:
        return share_of_roofline(run, llm.measure_rooflines())
    except DeviceError as error:
        return UnknownRoofline(str(error))


def _report(
    parsed: argparse.Namespace,
    options: EngineOptions,
    figures: Mapping[str, object],
    rows: Mapping[str, str],
) -> int:
    report = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pagedray": __version__,
        "model": parsed.model,
        "tensor_parallel_size": options.tensor_parallel_size,
        "seed": parsed.seed,
        **figures,
    }
    encoded = msgspec.json.encode(report)
    if parsed.json:
        print(encoded.decode())
    else:
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(justify="right")
        for name, value in rows.items():
            table.add_row(name, value)
        Console().print(table)
    if parsed.output_json is not None:
        try:
            parsed.output_json.write_bytes(msgspec.json.format(encoded) + b"\n")
        except OSError as error:
            raise StartupError(
                f"Cannot write --output-json {parsed.output_json}: {error.strerror}."
            ) from error
    return 0
