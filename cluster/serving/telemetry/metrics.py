"""The Prometheus metrics of the server: statistics of the engine, times of calls.

Labels have a bounded number of values: tenants come from the key file, up to a limit, and all other
labels are defined in code. docs/observability.md lists all names.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from cluster.serving.continuation import CAUSES, Cause
from cluster.serving.telemetry.call_report import outcome_of
from cluster.serving.telemetry.call_times import CallTimes
from cluster.serving.telemetry.engine_metrics import EngineCollector
from cluster.serving.telemetry.router_metrics import RouterCollector
from pagedray.errors import PagedRayError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.engine_client import EngineClient
    from cluster.serving.inputs import Frontend
    from cluster.serving.telemetry.call_report import CallReport
    from pagedray.config import EngineConfig

__all__ = ["Metrics"]

_MAX_TENANTS = 256
_OTHER_TENANTS = "(other)"


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
