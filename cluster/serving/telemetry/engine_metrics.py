"""The engine's statistics as Prometheus metrics, read at each scrape."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from cluster.engine.stats import EngineStats, HistogramSnapshot
    from cluster.scheduling.stats import SchedulerStats, SpeculationStats
    from cluster.serving.engine_client import EngineClient

__all__ = ["EngineCollector", "duration_family"]


class EngineCollector(Collector):
    """Collects an engine's statistics."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> list[Metric]:
        # Empty, so that registering the collector does not read the engine.
        return []

    def collect(self) -> Iterator[Metric]:
        is_healthy = self._client.is_healthy
        yield _gauge(
            "healthy", "Whether the engine makes progress and its logits are finite", is_healthy
        )
        if self._client.is_attached:
            stats = self._client.engine.stats()
            yield from _sequence_families(stats.scheduler)
            yield from _pool_families(stats)
            yield from _prefix_families(stats)
            yield from _state_families(stats.scheduler)
            yield from _kept_families(stats.scheduler)
            yield from _disk_families(stats)
            yield from _preemption_families(stats)
            yield from _draft_families(stats.scheduler.speculation)
            yield from _step_families(stats)


def _sequence_families(scheduler: SchedulerStats) -> Iterator[Metric]:
    yield _labeled_gauge(
        "sequences",
        "Sequences by state",
        "state",
        {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "swapped": scheduler.num_swapped,
        },
    )
    yield _gauge("queued_requests", "Requests not started", scheduler.num_queued_requests)
    yield _counter(
        "nonfinite_sequences",
        "Sequences that ended because their logits were not finite",
        scheduler.num_nonfinite_sequences,
    )


def _pool_families(stats: EngineStats) -> Iterator[Metric]:
    scheduler = stats.scheduler
    sizes = {"device": scheduler.num_blocks, "cpu": scheduler.num_cpu_blocks}
    free = {"device": scheduler.num_free_blocks, "cpu": scheduler.num_free_cpu_blocks}
    used = {pool: _used(size, free[pool]) for pool, size in sizes.items()}
    yield _labeled_gauge("blocks", "KV blocks of each pool", "pool", sizes)
    yield _labeled_gauge("free_blocks", "Free KV blocks of each pool", "pool", free)
    yield _labeled_gauge("kv_use", "Fraction of each pool in use, 0 to 1", "pool", used)
    yield _gauge(
        "unpinned_blocks",
        "Blocks of the CPU pools that cannot be pinned, on all ranks",
        stats.num_unpinned_blocks,
    )


def _prefix_families(stats: EngineStats) -> Iterator[Metric]:
    scheduler = stats.scheduler
    yield _gauge("cached_blocks", "Free cached blocks", scheduler.num_cached_blocks)
    yield _gauge(
        "prefix_cpu_blocks",
        "Blocks of the CPU pool in the prefix cache",
        scheduler.num_cached_cpu_blocks,
    )
    yield _counter(
        "prefix_queried_tokens",
        "Tokens looked up in the prefix cache",
        scheduler.num_queried_tokens,
    )
    yield _counter(
        "prefix_hit_tokens", "Tokens found in the prefix cache", scheduler.num_hit_tokens
    )
    yield _counter(
        "prefix_cpu_hit_tokens",
        "Tokens found in the prefix cache that were copied back from the CPU pool",
        scheduler.num_cpu_hit_tokens,
    )
    yield _labeled_counter(
        "prefix_copied_bytes",
        "Bytes of cached KV blocks copied out of and into device memory, on all ranks",
        "direction",
        {
            "out": scheduler.num_saved_blocks * stats.block_bytes,
            "in": scheduler.num_restored_blocks * stats.block_bytes,
        },
    )


def _state_families(scheduler: SchedulerStats) -> Iterator[Metric]:
    yield _labeled_counter(
        "prefix_states",
        "Snapshots of recurrent states that were made, reused, or not made for lack of blocks",
        "event",
        {
            "saved": scheduler.num_saved_states,
            "loaded": scheduler.num_loaded_states,
            "skipped": scheduler.num_skipped_states,
        },
    )
    yield _counter(
        "prefix_unreused_tokens",
        "Tokens found in the prefix cache and computed again, for lack of a recurrent state",
        scheduler.num_unreused_tokens,
    )


def _draft_families(drafts: SpeculationStats) -> Iterator[Metric]:
    yield _counter("chains", "Sequences with drafts in steps", drafts.num_chains)
    yield _counter("draft_tokens", "Drafts that steps verified", drafts.num_draft_tokens)
    yield _labeled_counter(
        "accepted_draft_tokens",
        "Drafts that were the tokens sampled, by their place among the drafts of a sequence",
        "position",
        drafts.by_position,
    )
    yield _gauge(
        "past_answer_bytes", "Size of past answers in which drafts are found", drafts.answer_bytes
    )


def _kept_families(scheduler: SchedulerStats) -> Iterator[Metric]:
    yield _counter(
        "prefix_kept_blocks",
        "Cached blocks of the CPU pool that were kept when ranks were replaced",
        scheduler.num_kept_cpu_blocks,
    )
    yield _counter(
        "prefix_kept_hit_tokens",
        "Tokens copied back from blocks that were kept when ranks were replaced",
        scheduler.num_kept_hit_tokens,
    )


def _disk_families(stats: EngineStats) -> Iterator[Metric]:
    scheduler = stats.scheduler
    yield _gauge(
        "prefix_disk_blocks",
        "Blocks on the disk in the prefix cache",
        scheduler.num_cached_disk_blocks,
    )
    yield _counter(
        "prefix_disk_hit_tokens",
        "Tokens found on the disk, which were read into the CPU pool",
        scheduler.num_disk_hit_tokens,
    )
    yield _labeled_counter(
        "prefix_disk_bytes",
        "Bytes of cached KV blocks written to the disk and read from it, on all ranks",
        "direction",
        {
            "out": scheduler.num_written_blocks * stats.block_bytes,
            "in": scheduler.num_read_blocks * stats.block_bytes,
        },
    )
    yield _labeled_counter(
        "prefix_disk_failures",
        "Blocks that a rank could not write to the disk, or read from it as they were written",
        "direction",
        {"out": scheduler.num_failed_writes, "in": scheduler.num_failed_reads},
    )


def _preemption_families(stats: EngineStats) -> Iterator[Metric]:
    scheduler = stats.scheduler
    yield _labeled_counter(
        "preemptions",
        "Preempted sequences, by kind",
        "kind",
        {"swap": scheduler.num_swap_preemptions, "recompute": scheduler.num_recompute_preemptions},
    )
    yield _labeled_counter(
        "swapped_bytes",
        "Bytes of KV blocks swapped out of and into device memory, on all ranks",
        "direction",
        {
            "out": scheduler.num_swapped_out_blocks * stats.block_bytes,
            "in": scheduler.num_swapped_in_blocks * stats.block_bytes,
        },
    )


def _step_families(stats: EngineStats) -> Iterator[Metric]:
    yield _gauge("last_step_seconds", "Duration of the last step", stats.last_step_s)
    yield duration_family("step_seconds", "Duration of a step", stats.step_times)
    yield _gauge(
        "uncaptured_graphs",
        "CUDA graphs that could not be captured; steps of their sizes run without them",
        stats.num_uncaptured_graphs,
    )
    yield _counter("steps", "Steps run", stats.num_steps)
    yield _counter("prompt_tokens", "Prompt tokens accepted", stats.num_prompt_tokens)
    yield _counter("generated_tokens", "Tokens generated", stats.num_generated_tokens)
    yield _labeled_counter(
        "rank_replacements",
        "Replacements of ranks after one had failed, by cause",
        "cause",
        stats.replacements,
    )
    yield _labeled_counter(
        "hangs", "Hangs found, by what made no progress", "kind", stats.num_hangs
    )
    yield _counter(
        "lethal_requests",
        "Requests that ended because ranks died whenever they ran",
        stats.num_lethal_requests,
    )
    layers = GaugeMetricFamily(
        "pagedray_attention_layers",
        "Layers by part of a step and provider of its attention kernels",
        labels=["part", "provider"],
    )
    for part, providers in stats.kernels.providers.items():
        for provider, num_layers in providers.items():
            layers.add_metric([part, provider], num_layers)
    yield layers
    yield _labeled_gauge(
        "replaced_kernels",
        "Kernels of matrix products that do not compile, so that slower ones replace them",
        "kernel",
        dict.fromkeys(stats.kernels.replaced, 1.0),
    )


def duration_family(name: str, text: str, counts: HistogramSnapshot) -> Metric:
    """Return a histogram of durations."""
    bounds = [*(str(bound) for bound in counts.bounds_s), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts.counts), strict=True))
    return HistogramMetricFamily(f"pagedray_{name}", text, buckets, counts.total_s)


def _used(num_blocks: int, num_free: int) -> float:
    return (num_blocks - num_free) / num_blocks if num_blocks else 0.0


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pagedray_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pagedray_{name}", text, value=value)


def _labeled_gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"pagedray_{name}", text, labels=[label]), values)


def _labeled_counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(f"pagedray_{name}", text, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
