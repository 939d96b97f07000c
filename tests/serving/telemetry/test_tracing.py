"""Spans of calls, as OpenTelemetry's own SDK receives them."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from cluster.serving.engine_client import EngineClient
from cluster.serving.inputs import CallOrigin, GenerationInput
from cluster.serving.servicer import Servicer
from cluster.serving.telemetry.call_log import CallReport
from cluster.serving.telemetry.tracing import Tracer, otlp_tracer
from pagedray.errors import InvalidRequestError, StartupError
from tests.serving.conftest import engine_config
from tests.serving.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACE_PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
SAMPLED = CallOrigin(frontend="http", traceparent=TRACE_PARENT, tracestate="vendor=1")


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def servicer(tokenizer: Tokenizer, exporter: InMemorySpanExporter) -> AsyncIterator[Servicer]:
    provider = TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    client = EngineClient(asyncio.get_running_loop())
    engine = FakeEngine(client, lambda request, index: [72, 73])
    client.attach_engine(engine)
    servicer = Servicer(client, tokenizer, engine_config(), tracer=Tracer(provider))
    servicer.set_ready()
    yield servicer
    await servicer.close()
    engine.stop()
    provider.shutdown()


async def run(servicer: Servicer, given: GenerationInput) -> None:
    generation = await servicer.start_generation(given)
    try:
        async for _ in generation.outputs():
            pass
    finally:
        generation.close()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_call_is_a_child_of_its_clients_span(
    servicer: Servicer, exporter: InMemorySpanExporter
) -> None:
    sampling = {"max_tokens": 4, "temperature": 0.5, "seed": 7}
    await run(servicer, GenerationInput(prompts=("a secret",), sampling=sampling, origin=SAMPLED))
    spans = by_name(exporter)
    assert set(spans) == {"text_completion tiny", "validate", "queue", "prefill", "decode"}
    root = spans.pop("text_completion tiny")
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" == TRACE_ID
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context is not None
    assert root.context.trace_state.to_header() == "vendor=1"
    for span in spans.values():
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
    attributes = dict(root.attributes or {})
    assert attributes[gen_ai_attributes.GEN_AI_OPERATION_NAME] == "text_completion"
    assert attributes[gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS] == 4
    assert attributes[gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS] == ("length",)
    assert attributes[gen_ai_attributes.GEN_AI_REQUEST_SEED] == 7
    assert "secret" not in str(attributes)
    names = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= names


async def test_phases_follow_one_another_within_the_call(
    servicer: Servicer, exporter: InMemorySpanExporter
) -> None:
    await run(servicer, GenerationInput(prompts=("x",), sampling={"max_tokens": 4}, origin=SAMPLED))
    spans = by_name(exporter)
    root = spans["text_completion tiny"]
    phases = [spans[name] for name in ("validate", "queue", "prefill", "decode")]
    marks = [root.start_time, *(mark for one in phases for mark in (one.start_time, one.end_time))]
    marks.append(root.end_time)
    assert marks == sorted(marks, key=lambda mark: mark or 0)
    assert phases[1].start_time == phases[0].end_time


async def test_rejection_is_an_error_of_its_kind(
    servicer: Servicer, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(InvalidRequestError):
        await run(servicer, GenerationInput(prompts=("",), origin=SAMPLED))
    spans = by_name(exporter)
    assert set(spans) == {"text_completion tiny", "validate"}
    root = spans["text_completion tiny"]
    assert root.status.status_code is StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "invalid"


@pytest.mark.parametrize(
    "header", [None, "", "00-0-0-01", f"00-{'0' * 32}-{PARENT_ID}-01", "é" * 999]
)
async def test_invalid_header_starts_no_trace(
    servicer: Servicer, exporter: InMemorySpanExporter, header: str | None
) -> None:
    # The sampler keeps only spans whose parent was sampled.
    origin = CallOrigin(frontend="http", traceparent=header)
    await run(servicer, GenerationInput(prompts=("x",), origin=origin, sampling={"max_tokens": 1}))
    assert exporter.get_finished_spans() == ()


class Collector:
    """Receives the posts of an exporter, as a collector does."""

    def __init__(self) -> None:
        self.received: list[tuple[str, ExportTraceServiceRequest]] = []
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                received.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def report(model: str = "tiny") -> CallReport:
    return CallReport(
        operation="chat",
        origin=CallOrigin(),
        tenant="",
        model=model,
        id="a",
        sampling=None,
        outcome="stop",
        is_rejected=False,
        arrived_s=1.0,
        validated_s=1.1,
        started_s=1.2,
        first_token_s=1.3,
        last_token_s=1.4,
        ended_s=1.5,
        num_sequences=1,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_generated_tokens=2,
    )


def test_spans_reach_a_collector(collector: Collector) -> None:
    tracer = otlp_tracer(collector.url, {})
    assert tracer is not None
    tracer.trace(report())
    tracer.close()
    ((path, message),) = collector.received
    assert path == "/v1/traces"
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    assert {span.name for span in scope.spans} == {
        *("chat tiny", "validate", "queue", "prefill", "decode")
    }
    assert {one.key: one.value.string_value for one in resource.resource.attributes}[
        "service.name"
    ] == "pagedray"


@pytest.mark.parametrize(
    "environment", [{}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}]
)
def test_nothing_is_traced_by_default(environment: dict[str, str]) -> None:
    assert otlp_tracer(None, environment) is None


def test_endpoint_without_a_scheme_is_rejected() -> None:
    with pytest.raises(
        StartupError, match="must be an http:// or https:// URL, not 'localhost:4318'"
    ):
        otlp_tracer("localhost:4318", {})
