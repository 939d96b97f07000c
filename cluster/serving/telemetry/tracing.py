"""OpenTelemetry spans of a call, created when it has ended from its recorded times.

    chat NAME                   the call, a child of the client's span if there is one
    |-- validate                tokenized and validated
    |-- queue                   until it is first scheduled
    |-- prefill                 until its first token
    `-- decode                  until its last token

Tracing therefore does not slow a running call. Attributes follow OpenTelemetry's conventions for
generative models and contain no text of a client.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    Span,
    SpanKind,
    Status,
    StatusCode,
    TracerProvider,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pagedray.errors import StartupError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cluster.serving.telemetry.call_log import CallReport

__all__ = ["Tracer", "otlp_tracer"]

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MAX_STATE_LENGTH = 512
_MAX_SHOWN_ID = 256
# Outcomes that are not errors.
_GOOD_OUTCOMES = frozenset(("stop", "length", "tool_calls", "abort", "cancelled"))

Attributes = dict[str, str | int | float | tuple[str, ...]]


class Tracer:
    """Creates the spans of calls."""

    def __init__(self, provider: TracerProvider, close: Callable[[], None] | None = None) -> None:
        """`close` flushes spans that have not been sent."""
        self._close = close
        self._tracer = provider.get_tracer("pagedray", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Flush spans that have not been sent. Blocks."""
        if self._close is not None:
            self._close()

    def trace(self, report: CallReport) -> None:
        """Create the spans of a call that ended."""
        # Spans have wall-clock times, calls have monotonic times.
        offset_ns = time.time_ns() - time.monotonic_ns()

        def wall(at_s: float) -> int:
            return int(at_s * 1e9) + offset_ns

        span = self._tracer.start_span(
            f"{report.operation} {report.model}",
            context=self._parent(report),
            kind=SpanKind.SERVER,
            attributes=_attributes(report),
            start_time=wall(report.arrived_s),
        )
        if span.is_recording():
            inside = set_span_in_context(span, Context())
            for name, begin_s, end_s in _phases(report):
                phase = self._tracer.start_span(name, context=inside, start_time=wall(begin_s))
                phase.end(wall(end_s))
            _set_status(span, report)
        span.end(wall(report.ended_s))

    def _parent(self, report: CallReport) -> Context:
        """Return the context of the client's span, or an empty context."""
        origin = report.origin
        if origin.traceparent is None:
            return Context()
        carrier = {"traceparent": origin.traceparent}
        if origin.tracestate is not None and len(origin.tracestate) <= _MAX_STATE_LENGTH:
            carrier["tracestate"] = origin.tracestate
        return self._propagator.extract(carrier, Context())


def otlp_tracer(
    endpoint: str | None, environment: Mapping[str, str] | None = None
) -> Tracer | None:
    """Return a tracer that sends spans to an OTLP collector, or None if none is configured.

    Without an endpoint, OpenTelemetry's environment variables are used. Raises StartupError if the
    libraries that send spans are not installed.
    """
    variables = os.environ if environment is None else environment
    is_named = any(variables.get(name) for name in _ENDPOINT_VARIABLES)
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (endpoint or is_named):
        return None
    try:
        # Optional dependencies, imported only if traces are sent.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider as SdkProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartupError(
            "Tracing requires the OpenTelemetry SDK and exporter: pip install 'pagedray[tracing]'."
        ) from error
    url = None if endpoint is None else _traces_url(endpoint)
    name = variables.get("OTEL_SERVICE_NAME") or "pagedray"
    resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
    provider = SdkProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return Tracer(provider, close=provider.shutdown)


def _traces_url(endpoint: str) -> str:
    if not endpoint.startswith(("http://", "https://")):
        raise StartupError(f"OTLP endpoint must be an http:// or https:// URL, not {endpoint!r}.")
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _attributes(report: CallReport) -> Attributes:
    attributes: Attributes = {
        "gen_ai.operation.name": report.operation,
        "gen_ai.provider.name": "pagedray",
        "gen_ai.request.model": report.model,
        "gen_ai.response.model": report.model,
        "gen_ai.usage.input_tokens": report.num_prompt_tokens,
        "gen_ai.usage.output_tokens": report.num_generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": report.num_cached_tokens,
        "pagedray.frontend": report.origin.frontend,
        "pagedray.tenant": report.tenant,
        "pagedray.outcome": report.outcome,
        "pagedray.sequences": report.num_sequences,
    }
    if report.id:
        attributes["gen_ai.response.id"] = report.id[:_MAX_SHOWN_ID]
    if report.outcome in ("stop", "length", "tool_calls"):
        attributes["gen_ai.response.finish_reasons"] = (report.outcome,)
    if report.first_token_s is not None:
        to_first_s = report.first_token_s - report.arrived_s
        attributes["gen_ai.response.time_to_first_chunk"] = to_first_s
    sampling = report.sampling
    if sampling is not None:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": float(sampling.temperature),
            "gen_ai.request.top_p": float(sampling.top_p),
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
            "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
            "gen_ai.request.choice.count": sampling.n,
        }
        if sampling.seed is not None:
            attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def _phases(report: CallReport) -> list[tuple[str, float, float]]:
    """Return name, begin and end of each phase that a call reached."""
    marks = (
        ("validate", report.validated_s),
        ("queue", report.started_s),
        ("prefill", report.first_token_s),
        ("decode", report.last_token_s),
    )
    phases: list[tuple[str, float, float]] = []
    begin_s = report.arrived_s
    for name, end_s in marks:
        if end_s is None:
            # The call ended within this phase, unless it was complete.
            end_s = report.ended_s
            if report.outcome in ("stop", "length", "tool_calls"):
                break
            phases.append((name, begin_s, max(begin_s, end_s)))
            break
        phases.append((name, begin_s, max(begin_s, end_s)))
        begin_s = max(begin_s, end_s)
    return phases


def _set_status(span: Span, report: CallReport) -> None:
    if report.outcome not in _GOOD_OUTCOMES:
        span.set_attribute("error.type", report.outcome)
        span.set_status(Status(StatusCode.ERROR))
