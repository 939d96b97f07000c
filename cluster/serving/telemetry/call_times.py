"""Prometheus histograms of calls: how long their parts take, and how many tokens they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.registry import Collector

from cluster.engine.stats import DurationHistogram
from cluster.serving.telemetry.engine_metrics import duration_family
from cluster.serving.telemetry.load_history import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from cluster.serving.telemetry.call_report import CallReport
    from pagedray.structure import StructureKind

__all__ = ["CallTimes"]

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_CALL_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_WORK_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_LENGTH_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)


class CallTimes:
    """Observes calls. Used from the event loop only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = DurationHistogram(sorted({*LATENCY_BOUNDS_S, *_TOKEN_BUCKETS}))
        """Times between two outputs of a call."""
        self._per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time between tokens of a call", _TOKEN_BUCKETS
        )
        self._duration = self._histogram(
            "request_duration_seconds", "From arrival to the end", _CALL_BUCKETS
        )
        self._queue_time = self._histogram(
            "queue_time_seconds", "From the end of validation to the first step", _QUEUE_BUCKETS
        )
        self._prefill_time = self._histogram(
            "prefill_time_seconds", "From the first step to the first token", _FIRST_TOKEN_BUCKETS
        )
        self._decode_time = self._histogram(
            "decode_time_seconds", "From the first token to the last one", _CALL_BUCKETS
        )
        self._inference_time = self._histogram(
            "inference_time_seconds", "From the first step to the last token", _CALL_BUCKETS
        )
        self._validation = self._histogram(
            "validation_seconds", "Time to tokenize and validate a call", _WORK_BUCKETS
        )
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a call", _LENGTH_BUCKETS
        )
        self._generated_length = self._histogram(
            "request_generated_tokens", "Tokens generated for a call", _LENGTH_BUCKETS
        )
        self._compiling = Histogram(
            "pagedray_structure_compile_seconds",
            "Time that calls waited for a structure to compile",
            ["kind"],
            buckets=_WORK_BUCKETS,
            registry=registry,
        )
        registry.register(_GapCollector(self.between_tokens))

    def observe_call(self, report: CallReport) -> None:
        """Observe a call that ended."""
        if report.validated_s is not None:
            self._validation.observe(report.validated_s - report.arrived_s)
        if report.is_rejected:
            return
        self._duration.observe(report.ended_s - report.arrived_s)
        self._prompt_length.observe(report.num_prompt_tokens)
        if report.started_s is not None and report.validated_s is not None:
            self._queue_time.observe(max(0.0, report.started_s - report.validated_s))
        if report.generates_tokens:
            self._observe_generation(report)

    def observe_compile(self, kind: StructureKind, duration_s: float) -> None:
        """Observe how long a call waited for its structure, also if it was cached or invalid."""
        self._compiling.labels(kind).observe(duration_s)

    def _observe_generation(self, report: CallReport) -> None:
        self._generated_length.observe(report.num_generated_tokens)
        if report.first_token_s is None or report.last_token_s is None:
            return
        decode_s = report.last_token_s - report.first_token_s
        self._decode_time.observe(decode_s)
        if report.started_s is not None:
            prefill_s = max(0.0, report.first_token_s - report.started_s)
            self._prefill_time.observe(prefill_s)
            self._inference_time.observe(prefill_s + decode_s)
        num_gaps = report.num_generated_tokens / max(report.num_sequences, 1) - 1
        if num_gaps > 0:
            self._per_token.observe(decode_s / num_gaps)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pagedray_{name}", text, buckets=buckets, registry=self._registry)


class _GapCollector(Collector):
    """The times between outputs, which the library's histogram would observe too slowly.

    The bins are smaller than in Prometheus, for the quantiles of the load history.
    """

    def __init__(self, counter: DurationHistogram) -> None:
        self._counter = counter

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield duration_family(
            "inter_token_latency_seconds",
            "Time between two outputs of a call that have tokens",
            self._counter.snapshot().in_bins(_TOKEN_BUCKETS),
        )
