"""What the server tells Prometheus: counts of the engine, times of the calls.

Labels have few, fixed values; nothing that a client sends becomes one.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedray.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    UnknownModelError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.engine_client import EngineClient

__all__ = ["CallTiming", "Metrics"]

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_CALL_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_OUTCOME_OF: tuple[tuple[type[PagedRayError], str], ...] = (
    (InvalidRequestError, "invalid"),
    (UnknownModelError, "invalid"),
    (OverloadedError, "overloaded"),
    (DeadlineError, "deadline"),
    (EngineError, "unavailable"),
)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client))
        self._calls = Counter(
            "pagedray_requests_total",
            "Requests that ended, by how they ended",
            ["outcome"],
            registry=self._registry,
        )
        self.first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self.per_token = self._histogram(
            "time_per_output_token", "Between two tokens, mean of a request", _TOKEN_BUCKETS
        )
        self.call = self._histogram("request_duration", "From arrival to the end", _CALL_BUCKETS)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def timing(self, started_s: float) -> CallTiming:
        """Return the clock of a call that arrived at `started_s`, on the monotonic clock."""
        return CallTiming(self, started_s)

    def count_refusal(self, error: PagedRayError) -> None:
        """Count a call that was not started."""
        self.count(_outcome(error))

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Count a call that is refused while its message is read."""
        try:
            yield
        except PagedRayError as error:
            self.count_refusal(error)
            raise

    def count(self, outcome: str) -> None:
        """Count a call that ended."""
        self._calls.labels(outcome).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pagedray_{name}_seconds", text, buckets=buckets, registry=self._registry)


class CallTiming:
    """When the tokens of one call came."""

    def __init__(self, metrics: Metrics, started_s: float) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._num_first_tokens = 0
        self._num_tokens = 0
        self._is_ended = False

    def add_tokens(self, num_tokens: int) -> None:
        """Note tokens that came at this moment."""
        if num_tokens == 0:
            return
        self._last_s = time.monotonic()
        self._num_tokens += num_tokens
        if self._first_s is None:
            self._first_s = self._last_s
            self._num_first_tokens = num_tokens
            self._metrics.first_token.observe(self._first_s - self._started_s)

    def end(self, outcome: str | PagedRayError) -> None:
        """Note the end; only the first one counts."""
        if self._is_ended:
            return
        self._is_ended = True
        self._metrics.count(outcome if isinstance(outcome, str) else _outcome(outcome))
        self._metrics.call.observe(time.monotonic() - self._started_s)
        num_later_tokens = self._num_tokens - self._num_first_tokens
        if self._first_s is not None and num_later_tokens > 0:
            self._metrics.per_token.observe((self._last_s - self._first_s) / num_later_tokens)


class _EngineCollector(Collector):
    """Reads the engine's counts when they are asked for."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        is_healthy = self._client.is_healthy
        yield _gauge("healthy", "Whether the engine makes progress", float(is_healthy))
        if not self._client.is_attached:
            return
        stats = self._client.engine.stats()
        scheduler = stats.scheduler
        yield _labelled_gauge(
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
        yield _labelled_gauge(
            "blocks",
            "KV blocks of each pool",
            "pool",
            {"device": scheduler.num_blocks, "cpu": scheduler.num_cpu_blocks},
        )
        yield _labelled_gauge(
            "free_blocks",
            "KV blocks of each pool that are free",
            "pool",
            {"device": scheduler.num_free_blocks, "cpu": scheduler.num_free_cpu_blocks},
        )
        yield _gauge("cached_blocks", "Free blocks with known content", scheduler.num_cached_blocks)
        yield _gauge(
            "last_step_seconds",
            "What the last step took",
            stats.last_step_s,
        )
        yield _counter("steps", "Steps run", stats.num_steps)
        yield _counter("prompt_tokens", "Prompt tokens accepted", stats.num_prompt_tokens)
        yield _counter("generated_tokens", "Tokens generated", stats.num_generated_tokens)
        yield _counter(
            "prefix_queried_tokens",
            "Tokens looked up in the prefix cache",
            scheduler.num_queried_tokens,
        )
        yield _counter(
            "prefix_hit_tokens", "Tokens found in the prefix cache", scheduler.num_hit_tokens
        )
        layers = GaugeMetricFamily(
            "pagedray_attention_layers",
            "Layers by part of a step and whose attention kernels serve it",
            labels=["part", "server"],
        )
        for part, servers in stats.attention_servers.items():
            for server, num_layers in servers.items():
                layers.add_metric([part, server], num_layers)
        yield layers
        preemptions = CounterMetricFamily(
            "pagedray_preemptions", "Sequences that made room, by how", labels=["kind"]
        )
        preemptions.add_metric(["swap"], scheduler.num_swap_preemptions)
        preemptions.add_metric(["recompute"], scheduler.num_recompute_preemptions)
        yield preemptions


def _outcome(error: PagedRayError) -> str:
    return next((outcome for kind, outcome in _OUTCOME_OF if isinstance(error, kind)), "error")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"pagedray_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"pagedray_{name}", text, value=value)


def _labelled_gauge(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"pagedray_{name}", text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
