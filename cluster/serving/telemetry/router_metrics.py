"""Metrics under vLLM's names, for request routers, gateways and dashboards.

The endpoint picker of the Gateway API Inference Extension reads running, waiting, KV use and the
size of the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry

    from cluster.serving.engine_client import EngineClient
    from pagedray.config import EngineConfig

__all__ = ["RouterCollector"]

_HISTOGRAMS = {
    "pagedray_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "pagedray_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "pagedray_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "pagedray_queue_time_seconds": "vllm:request_queue_time_seconds",
    "pagedray_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "pagedray_decode_time_seconds": "vllm:request_decode_time_seconds",
    "pagedray_inference_time_seconds": "vllm:request_inference_time_seconds",
    "pagedray_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "pagedray_request_prompt_tokens": "vllm:request_prompt_tokens",
    "pagedray_request_generated_tokens": "vllm:request_generation_tokens",
}
_CALLS = "pagedray_requests"
_REASONS = {
    "abort": "abort",
    "cancelled": "abort",
    "length": "length",
    "stalled": "abort",
    "stop": "stop",
    "tool_calls": "stop",
}
"""vLLM's names of the ends of calls, by outcome."""


class RouterCollector(Collector):
    """Collects our metrics under vLLM's names."""

    def __init__(
        self, client: EngineClient, config: EngineConfig, registry: CollectorRegistry
    ) -> None:
        self._client = client
        self._model = config.model.name
        self._block_size = config.cache.block_size
        self._registry = registry

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if family.name in _HISTOGRAMS:
                yield self._renamed(family, _HISTOGRAMS[family.name])
            elif family.name == _CALLS:
                yield self._ends(family)
        if not self._client.is_attached:
            return
        stats = self._client.engine.stats()
        scheduler = stats.scheduler
        num_blocks = scheduler.num_blocks
        used = (num_blocks - scheduler.num_free_blocks) / num_blocks if num_blocks else 0.0
        num_waiting = scheduler.num_waiting + scheduler.num_swapped
        yield self._gauge("num_requests_running", "Running sequences", scheduler.num_running)
        yield self._gauge("num_requests_waiting", "Waiting or swapped sequences", num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1", used)
        yield self._gauge("gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc", used)
        yield self._cache_config(num_blocks)
        yield self._counter(
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache",
            scheduler.num_queried_tokens,
        )
        yield self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache", scheduler.num_hit_tokens
        )
        yield self._counter(
            "num_preemptions",
            "Preempted sequences",
            scheduler.num_swap_preemptions + scheduler.num_recompute_preemptions,
        )
        yield self._counter("prompt_tokens", "Prompt tokens accepted", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.num_generated_tokens)

    def _ends(self, calls: Metric) -> Metric:
        """Return how many calls ended for each of vLLM's reasons."""
        counts = dict.fromkeys(_REASONS.values(), 0.0)
        for sample in calls.samples:
            reason = _REASONS.get(sample.labels.get("outcome", ""))
            if reason is not None and sample.name == f"{_CALLS}_total":
                counts[reason] += sample.value
        family = CounterMetricFamily(
            "vllm:request_success",
            "Calls that ended without an error",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in counts.items():
            family.add_metric([self._model, reason], count)
        return family

    def _cache_config(self, num_blocks: int) -> Metric:
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Size of the KV cache; always 1",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        family.add_metric([self._model, str(self._block_size), str(num_blocks)], 1)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"]), value)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

    def _renamed(self, family: Metric, name: str) -> Metric:
        renamed = Metric(name, family.documentation, family.type)
        for sample in family.samples:
            labels = {"model_name": self._model, **sample.labels}
            own_name = name + sample.name.removeprefix(family.name)
            renamed.samples.append(Sample(own_name, labels, sample.value))
        return renamed
