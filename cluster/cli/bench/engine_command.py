"""`pagedray bench latency` and `throughput`: an engine in this process, without a server."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.cli.bench.client import DraftCounts
from cluster.cli.bench.datasets import WORKLOADS, RandomLengths, uniform_workload
from cluster.cli.bench.flags import DEFAULT_NUM_PROMPTS, LENGTH_FLAGS
from cluster.cli.terminal import TextLLM
from cluster.engine.engine_options import default_device
from pagedray.errors import DeviceError, StartupError
from pagedray.sampling_params import SamplingParams
from pagedray.text import pluralize
from pagedray.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from cluster.cli.bench.datasets import EngineRequest, Workload
    from cluster.engine.engine_options import EngineOptions
    from cluster.engine.stats import EngineStats
    from cluster.llm.llm import LLM
    from pagedray.rank_roofline import ExpertChoice, RankRoofline

__all__ = [
    "MeasuredRun",
    "SequenceLengths",
    "UnknownRoofline",
    "bench_latency",
    "bench_throughput",
    "share_of_roofline",
]

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
        after = llm.stats()
        num_steps = (after.num_steps - before.num_steps) / parsed.num_iters
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
        **_drafts(before, after).figures(),
        "roofline": roofline.figures(),
    }
    rows = {
        "Batches": str(len(latencies_s)),
        "Mean (s)": f"{mean_s:.4f}",
        **{f"p{name} (s)": f"{value:.4f}" for name, value in percentiles.items()},
        "Median per output token (ms)": f"{figures['ms_per_token']:.3f}",
        "Output tokens per second (median)": f"{figures['output_tokens_per_second']:.2f}",
        **_drafts(before, after).rows(),
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
        **_drafts(before, after).figures(),
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
        **_drafts(before, after).rows(),
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


def _drafts(before: EngineStats, after: EngineStats) -> DraftCounts:
    """Return the guesses between two readings."""
    counts = [
        DraftCounts(found.num_chains, found.num_draft_tokens, found.num_accepted_tokens)
        for found in (before.scheduler.speculation, after.scheduler.speculation)
    ]
    return counts[1].since(counts[0])


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


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """The tokens of one request."""

    num_prompt: int
    num_cached: int
    """Tokens of the prompt that were not computed."""
    num_output: int

    def num_pairs(self, window: int | None) -> int:
        """Return the pairs of a computed token and a token that it sees, itself included."""
        # The last token is sampled, and never computed.
        return _sum_of_contexts(self.num_cached + 1, self.num_prompt + self.num_output - 1, window)

    def num_cache_reads(self, window: int | None) -> int:
        """Return how often the keys and values of a cached token are read.

        Each generated token but the first reads its context. A prompt reads its cached part once.
        """
        of_prompt = _sum_of_contexts(self.num_cached, self.num_cached, window)
        first, last = self.num_prompt + 1, self.num_prompt + self.num_output - 1
        return of_prompt + _sum_of_contexts(first, last, window)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Requests that were generated, and how long that took."""

    seconds: float
    num_steps: float
    requests: tuple[SequenceLengths, ...]
    max_step_tokens: int
    """The most tokens that a step computes."""

    @property
    def num_prompt_rows(self) -> int:
        """The tokens of prompts that were computed."""
        return sum(one.num_prompt - one.num_cached for one in self.requests)

    @property
    def num_sampled(self) -> int:
        """Number of generated tokens."""
        return sum(one.num_output for one in self.requests)

    @property
    def num_decode_rows(self) -> int:
        """The generated tokens that were computed, which are all but the last of each request."""
        return self.num_sampled - len(self.requests)

    def expert_steps(self, choice: ExpertChoice) -> float:
        """Return the expected number of times that all experts of a layer are read.

        Prompts are taken to be in as few steps as they fit in, and rows of other steps to be as
        many in each.
        """
        num_first = min(self.num_steps, math.ceil(self.num_prompt_rows / self.max_step_tokens))
        times = 0.0
        for num_steps, num_rows in (
            (num_first, self.num_prompt_rows),
            (self.num_steps - num_first, self.num_decode_rows),
        ):
            if num_steps and num_rows:
                times += num_steps * choice.expected_part(num_rows / num_steps)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineShare:
    """The roofline of the rank that is closest to it; bytes, FLOP and times are means of a step."""

    share: float
    """The larger of the next two."""
    memory_share: float
    compute_share: float
    rank: int
    step_ms: float
    weight_bytes_per_step: float
    kv_bytes_per_step: float
    flop_per_step: float
    experts_per_layer: float | None
    """The expected number of which a step reads the weights, if tokens choose all as often."""
    num_experts: int | None
    """Number of experts in each layer; None if the model has none."""
    read_bytes_per_second: float
    """Measured, as the next two."""
    flop_per_second: float
    fp8_flop_per_second: float | None

    def figures(self) -> dict[str, object]:
        """Return the fields by name."""
        return asdict(self)

    def rows(self) -> dict[str, str]:
        """Return lines of a table."""
        weights, cache = self.weight_bytes_per_step / 1e9, self.kv_bytes_per_step / 1e9
        what = "Share of the roofline"
        rows = {
            "Mean step (ms)": f"{self.step_ms:.3f}",
            "Read by a step (GB)": f"{weights:,.3g} of weights, {cache:,.3g} of KV cache",
            "Share of memory bandwidth": f"{self.memory_share:.2f} of the measured "
            f"{self.read_bytes_per_second / 1e9:,.4g} GB/s",
            "Share of compute": f"{self.compute_share:.2f} of the measured {self._compute_text}",
            what: f"{self.share:.2f}",
        }
        if self.experts_per_layer is not None:
            rows["Experts read by a step"] = (
                f"{self.experts_per_layer:.1f} of {self.num_experts} in a layer, if chosen evenly"
            )
        rows[what] = rows.pop(what)
        return rows

    @property
    def _compute_text(self) -> str:
        text = f"{self.flop_per_second / 1e12:,.3g} TFLOP/s"
        if self.fp8_flop_per_second is not None:
            text += f", {self.fp8_flop_per_second / 1e12:,.3g} in fp8"
        return text


@dataclass(frozen=True, slots=True)
class UnknownRoofline:
    """The reason why the share of the roofline is not known."""

    reason: str

    def figures(self) -> dict[str, object]:
        """Return the fields by name."""
        return {"share": None, "reason": self.reason}

    def rows(self) -> dict[str, str]:
        """Return lines of a table."""
        return {"Share of the roofline": f"unknown: {self.reason}"}


def share_of_roofline(run: MeasuredRun, rooflines: Sequence[RankRoofline]) -> RooflineShare:
    """Return the largest share of all ranks."""
    shares = [_rank_share(run, rank, roofline) for rank, roofline in enumerate(rooflines)]
    return max(shares, key=lambda one: one.share)


def _rank_share(run: MeasuredRun, rank: int, roofline: RankRoofline) -> RooflineShare:
    num_rows = run.num_prompt_rows + run.num_decode_rows
    speed = roofline.speed
    weight_bytes = run.num_steps * float(roofline.weights.num_bytes + roofline.sampled.num_bytes)
    experts_per_layer = None
    if roofline.experts is not None:
        times = run.expert_steps(roofline.experts)
        weight_bytes += times * (roofline.weights.expert_bytes + roofline.sampled.expert_bytes)
        experts_per_layer = times / run.num_steps * roofline.experts.num_experts
    # A chunk of a prompt has more tokens for a state.
    kv_bytes, flop = 2.0 * roofline.state_bytes * run.num_decode_rows, 0.0
    for attention in roofline.attention:
        window = attention.window
        kv_bytes += attention.token_bytes * sum(one.num_cache_reads(window) for one in run.requests)
        flop += attention.pair_flop * sum(one.num_pairs(window) for one in run.requests)
    flop += roofline.weights.row_flop * num_rows + roofline.sampled.row_flop * run.num_sampled
    fp8_flop = (
        roofline.weights.fp8_row_flop * num_rows + roofline.sampled.fp8_row_flop * run.num_sampled
    )
    compute_s = flop / speed.flop_per_s
    if speed.fp8_flop_per_s is not None:
        compute_s += fp8_flop / speed.fp8_flop_per_s
    memory_share = (weight_bytes + kv_bytes) / speed.read_bytes_per_s / run.seconds
    return RooflineShare(
        share=max(memory_share, compute_s / run.seconds),
        memory_share=memory_share,
        compute_share=compute_s / run.seconds,
        rank=rank,
        step_ms=run.seconds / run.num_steps * 1e3,
        weight_bytes_per_step=weight_bytes / run.num_steps,
        kv_bytes_per_step=kv_bytes / run.num_steps,
        flop_per_step=(flop + fp8_flop) / run.num_steps,
        experts_per_layer=experts_per_layer,
        num_experts=None if roofline.experts is None else roofline.experts.num_experts,
        read_bytes_per_second=speed.read_bytes_per_s,
        flop_per_second=speed.flop_per_s,
        fp8_flop_per_second=speed.fp8_flop_per_s,
    )


def _sum_of_contexts(first: int, last: int, window: int | None) -> int:
    """Return the sum of `min(context, window)` for contexts from `first` to `last`."""
    if last < first:
        return 0
    if window is None or last <= window:
        return (first + last) * (last - first + 1) // 2
    num_whole = max(0, last - max(first, window) + 1)
    return num_whole * window + _sum_of_contexts(first, min(last, window - 1), None)
