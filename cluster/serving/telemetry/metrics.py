"""The Prometheus metrics of the server: statistics of the engine, times of calls.

Labels have a bounded number of values: tenants are those of the key file, up to a limit, and all
others are defined in code. docs/observability.md lists all names.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from cluster.engine.duration_histogram import DurationHistogram
from cluster.serving.continuation import CAUSES, Cause
from cluster.serving.telemetry.call_report import outcome_of
from cluster.serving.telemetry.engine_metrics import EngineCollector, duration_family
from cluster.serving.telemetry.load_history import LATENCY_BOUNDS_S
from cluster.serving.telemetry.router_metrics import RouterCollector
from pagedray.errors import PagedRayError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import Frontend
    from cluster.serving.telemetry.call_report import CallReport
    from pagedray.config import EngineConfig
    from pagedray.request import StructureKind

__all__ = ["Metrics"]

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_CALL_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_WORK_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_LENGTH_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)
_MAX_TENANTS = 256
_OTHER_TENANTS = "(other)"


class Metrics:
    """The metrics of one server, in a registry of their own. Used from the event loop only."""

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        self._calls = self._counter("requests", "Calls that ended", "front", "outcome")
        self._refusals = self._counter(
            "refusals", "Calls rejected before they reached the engine", "front", "reason"
        )
        self._ignored = self._counter(
            "ignored_parameters", "Parameters of calls that were ignored", "parameter"
        )
        self._continuations = self._counter(
            "continuations", "Calls continued here after another replica failed", "cause"
        )
        for cause in CAUSES:
            self._continuations.labels(cause)
        self._stalled_readers = self._counter(
            "stalled_readers", "Clients disconnected because they did not read", "front"
        )
        for frontend in ("http", "grpc"):
            self._stalled_readers.labels(frontend)
        self._unread_output = Gauge(
            "pagedray_unread_output_bytes",
            "Memory for output that clients have not read",
            registry=self.registry,
        )
        self._resumes = self._counter("stream_resumes", "Calls that resumed a stream", "front")
        for frontend in ("http", "grpc"):
            self._resumes.labels(frontend)
        self._streams = Gauge(
            "pagedray_resumable_streams", "Streams that can be resumed", registry=self.registry
        )
        self._stream_bytes = Gauge(
            "pagedray_resume_buffer_bytes",
            "Memory for the messages of streams that can be resumed",
            registry=self.registry,
        )
        self._tenant_calls = self._counter("tenant_requests", "Calls that ended", "tenant")
        self._tenant_tokens = self._counter(
            "tenant_tokens", "Tokens of calls that ended", "tenant", "kind"
        )
        self._tokens_in_flight = Gauge(
            "pagedray_tokens_in_flight",
            "Prompt tokens and maximum tokens to generate of open calls",
            registry=self.registry,
        )
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
            registry=self.registry,
        )
        info = Gauge(
            "pagedray_info",
            "Version and model; always 1",
            ["version", "model"],
            registry=self.registry,
        )
        info.labels(__version__, config.model.name).set(1)
        self.registry.register(_GapCollector(self.between_tokens))
        self._tenants: set[str] = set()
        # Separate, because its collector reads the other registry.
        self._router_registry = CollectorRegistry()
        self._router_registry.register(RouterCollector(client, config, self.registry))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self._router_registry)

    def count_call(self, report: CallReport) -> None:
        """Count a call that ended."""
        self._count(report.outcome, report.origin.frontend, is_refused=report.is_refused)
        tenant = self._tenant(report.tenant)
        self._tenant_calls.labels(tenant).inc()
        if report.validated_s is not None:
            self._validation.observe(report.validated_s - report.arrived_s)
        if report.is_refused:
            return
        self._duration.observe(report.ended_s - report.arrived_s)
        self._prompt_length.observe(report.num_prompt_tokens)
        self._tenant_tokens.labels(tenant, "prompt").inc(report.num_prompt_tokens)
        if report.started_s is not None and report.validated_s is not None:
            self._queue_time.observe(max(0.0, report.started_s - report.validated_s))
        if report.operation in ("embeddings", "score"):
            return
        self._generated_length.observe(report.num_generated_tokens)
        self._tenant_tokens.labels(tenant, "generated").inc(report.num_generated_tokens)
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

    def count_stalled_reader(self, frontend: Frontend) -> None:
        """Count a client that was disconnected because it did not read."""
        self._stalled_readers.labels(frontend).inc()

    def count_ignored(self, parameter: str) -> None:
        """Count a parameter that was ignored; its name is one that is defined in code."""
        self._ignored.labels(parameter).inc()

    def count_resume(self, frontend: Frontend) -> None:
        """Count a call that resumed a stream."""
        self._resumes.labels(frontend).inc()

    def follow_readers(
        self,
        *,
        num_unread_bytes: Callable[[], float],
        num_streams: Callable[[], float],
        num_stream_bytes: Callable[[], float],
    ) -> None:
        """Report what is kept for readers, which the functions return."""
        self._unread_output.set_function(num_unread_bytes)
        self._streams.set_function(num_streams)
        self._stream_bytes.set_function(num_stream_bytes)

    def hold_tokens(self, num_tokens: int) -> None:
        """Add the tokens of a call that opens, or subtract those of one that ends."""
        self._tokens_in_flight.inc(num_tokens)

    def count_compile(self, kind: StructureKind, duration_s: float) -> None:
        """Record how long a call waited for its structure, also if it was cached or invalid."""
        self._compiling.labels(kind).observe(duration_s)

    def count_continuation(self, cause: Cause) -> None:
        """Count a call that began in another replica."""
        self._continuations.labels(cause).inc()

    def count_refusal(self, error: Exception, frontend: Frontend = "none") -> None:
        """Count a call that was rejected before it had a watch."""
        self._count(outcome_of(error), frontend, is_refused=True)

    @contextmanager
    def counting_refusals(self, frontend: Frontend = "none") -> Iterator[None]:
        """Count a call that is rejected inside the block."""
        try:
            yield
        except PagedRayError as error:
            self.count_refusal(error, frontend)
            raise

    def count_outcome(self, outcome: str, frontend: Frontend = "none") -> None:
        """Count a call that a frontend rejected, by its outcome."""
        self._count(outcome, frontend, is_refused=True)

    def _count(self, outcome: str, frontend: Frontend, *, is_refused: bool) -> None:
        self._calls.labels(frontend, outcome).inc()
        if is_refused:
            self._refusals.labels(frontend, outcome).inc()

    def _tenant(self, name: str) -> str:
        """Return a tenant's label: its name, or a common one if there are too many."""
        if name not in self._tenants:
            if len(self._tenants) >= _MAX_TENANTS:
                return _OTHER_TENANTS
            self._tenants.add(name)
        return name

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pagedray_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"pagedray_{name}", text, buckets=buckets, registry=self.registry)


class _GapCollector(Collector):
    """The times between outputs, which the library's histogram would observe too slowly.

    Their bins are smaller than those of Prometheus, for the quantiles of the load history.
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
