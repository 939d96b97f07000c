"""A collector of OpenTelemetry spans: an OTLP server over HTTP on the loopback."""

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.quiet_server import QuietServer


class SpanCollector:
    """Records the attributes of all received spans, as a context manager."""

    def __init__(self) -> None:
        spans: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            # The name is required by the library.
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(
                    {one.key: _text(one.value) for one in span.attributes}
                    for resource in request.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Log nothing to the output of the test."""

        self._spans = spans
        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        """The endpoint URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def span_with(self, key: str, value: str, *, timeout_s: float) -> dict[str, str]:
        """Wait for a span with an attribute, and return all its attributes."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for span in list(self._spans):
                if span.get(key) == value:
                    return span
            time.sleep(0.05)
        raise AssertionError(f"No span came with {key} = {value}.")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    return "" if kind is None else str(getattr(value, kind))
