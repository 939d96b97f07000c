"""The Prometheus metrics of the server: statistics of the engine, times of calls.

Labels have a bounded number of values: tenants come from the key file, up to a limit, and all other
labels are defined in code. docs/observability.md lists all names.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from cluster.engine.stats import DurationHistogram
from cluster.serving.continuation import CAUSES, Cause
from cluster.serving.telemetry.call_log import outcome_of
from cluster.serving.telemetry.engine_metrics import EngineCollector, duration_family
from cluster.serving.telemetry.load_history import LATENCY_BOUNDS_S
from pagedray.errors import PagedRayError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.scheduling.stats import SpeculationStats
    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import Frontend
    from cluster.serving.telemetry.call_log import CallReport
    from pagedray.config import EngineConfig
    from pagedray.sampling_params import StructureKind

__all__ = ["Metrics"]

_MAX_TENANTS = 256
_OTHER_TENANTS = "(other)"
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

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_CALL_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_WORK_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_LENGTH_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072, 524288)


class Metrics:
    """The metrics of one server, in a registry of their own. Used from the event loop only."""

    def __init__(self, client: EngineClient, config: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        self._calls = self._counter("requests", "Calls that ended", "frontend", "outcome")
        self._rejections = self._counter(
            "rejections", "Calls rejected before they reached the engine", "frontend", "reason"
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
            "stalled_readers", "Clients disconnected because they did not read", "frontend"
        )
        for frontend in ("http", "grpc"):
            self._stalled_readers.labels(frontend)
        self._unread_output = self._gauge(
            "unread_output_bytes", "Memory for output that clients have not read"
        )
        self._resumes = self._counter("stream_resumes", "Calls that resumed a stream", "frontend")
        for frontend in ("http", "grpc"):
            self._resumes.labels(frontend)
        self._streams = self._gauge("resumable_streams", "Streams that can be resumed")
        self._stream_bytes = self._gauge(
            "resume_buffer_bytes", "Memory for the messages of streams that can be resumed"
        )
        self._tenant_calls = self._counter("tenant_requests", "Calls that ended", "tenant")
        self._tenant_tokens = self._counter(
            "tenant_tokens", "Tokens of calls that ended", "tenant", "kind"
        )
        self._tokens_in_flight = self._gauge(
            "tokens_in_flight", "Prompt tokens and maximum tokens to generate of open calls"
        )
        self.times = CallTimes(self.registry)
        info = self._gauge("info", "Version and model; always 1", "version", "model")
        info.labels(__version__, config.model.name).set(1)
        self._tenants: set[str] = set()
        # Separate, because its collector reads the other registry.
        self._router_registry = CollectorRegistry()
        self._router_registry.register(RouterCollector(client, config, self.registry))

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry) + generate_latest(self._router_registry)

    def count_call(self, report: CallReport) -> None:
        """Count a call that ended."""
        self._count(report.outcome, report.origin.frontend, is_rejected=report.is_rejected)
        tenant = self._tenant(report.tenant)
        self._tenant_calls.labels(tenant).inc()
        self.times.observe_call(report)
        if report.is_rejected:
            return
        self._tenant_tokens.labels(tenant, "prompt").inc(report.num_prompt_tokens)
        if report.generates_tokens:
            self._tenant_tokens.labels(tenant, "generated").inc(report.num_generated_tokens)

    def count_stalled_reader(self, frontend: Frontend) -> None:
        """Count a client that was disconnected because it did not read."""
        self._stalled_readers.labels(frontend).inc()

    def count_ignored(self, parameter: str) -> None:
        """Count a parameter that was ignored; its name is defined in code."""
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
        """Report the unread output and the streams, which the functions return."""
        self._unread_output.set_function(num_unread_bytes)
        self._streams.set_function(num_streams)
        self._stream_bytes.set_function(num_stream_bytes)

    def hold_tokens(self, num_tokens: int) -> None:
        """Add the tokens of a call that opens, or subtract the tokens of a call that ends."""
        self._tokens_in_flight.inc(num_tokens)

    def count_continuation(self, cause: Cause) -> None:
        """Count a call that began in another replica."""
        self._continuations.labels(cause).inc()

    def count_rejection(self, error: Exception, frontend: Frontend) -> None:
        """Count a call that was rejected before it had a watch."""
        self._count(outcome_of(error), frontend, is_rejected=True)

    @contextmanager
    def counting_rejections(self, frontend: Frontend) -> Iterator[None]:
        """Count a call that is rejected inside the block."""
        try:
            yield
        except PagedRayError as error:
            self.count_rejection(error, frontend)
            raise

    def count_outcome(self, outcome: str, frontend: Frontend) -> None:
        """Count a call that a frontend rejected, by its outcome."""
        self._count(outcome, frontend, is_rejected=True)

    def _count(self, outcome: str, frontend: Frontend, *, is_rejected: bool) -> None:
        self._calls.labels(frontend, outcome).inc()
        if is_rejected:
            self._rejections.labels(frontend, outcome).inc()

    def _tenant(self, name: str) -> str:
        """Return a tenant's label: its name, or a common label if there are too many."""
        if name not in self._tenants:
            if len(self._tenants) >= _MAX_TENANTS:
                return _OTHER_TENANTS
            self._tenants.add(name)
        return name

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pagedray_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"pagedray_{name}", text, labels, registry=self.registry)


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
        yield from self._drafts(scheduler.speculation)
        yield self._counter("prompt_tokens", "Prompt tokens accepted", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", stats.num_generated_tokens)

    def _drafts(self, drafts: SpeculationStats) -> Iterator[Metric]:
        """Yield the counters of drafts."""
        name, accepted = "spec_decode_num", drafts.num_accepted_tokens
        yield self._counter(f"{name}_drafts", "Sequences with drafts in steps", drafts.num_chains)
        yield self._counter(f"{name}_draft_tokens", "Drafts verified", drafts.num_draft_tokens)
        yield self._counter(f"{name}_accepted_tokens", "Drafts accepted", accepted)
        family = CounterMetricFamily(
            f"vllm:{name}_accepted_tokens_per_pos",
            "Drafts accepted, by their place among the drafts of a sequence",
            labels=["model_name", "position"],
        )
        for position, count in drafts.by_position.items():
            family.add_metric([self._model, position], count)
        yield family

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
