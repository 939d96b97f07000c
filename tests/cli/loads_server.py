"""A server that serves only `/loads`."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from cluster.serving.server_info import CallInfo, ServerLoads

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LOADS", "serving"]

LOADS = ServerLoads(
    is_ready=True,
    uptime_s=100.0,
    num_running=3,
    num_waiting=2,
    num_swapped=1,
    num_queued_requests=2,
    num_queued_tokens=700,
    num_blocks=200,
    num_free_blocks=50,
    num_cached_blocks=20,
    num_cpu_blocks=100,
    num_free_cpu_blocks=90,
    num_steps=1000,
    last_step_s=0.012,
    num_prompt_tokens=5000,
    num_generated_tokens=9000,
    num_queried_tokens=100,
    num_hit_tokens=25,
    num_preemptions=4,
    calls=tuple(
        CallInfo(id=f"call-{number}", age_s=1.5, num_prompt_tokens=10, num_generated_tokens=number)
        for number in range(30)
    ),
)


@contextmanager
def serving(
    body: bytes, status: int = 200, *, until: threading.Event | None = None
) -> Iterator[tuple[str, list[str | None]]]:
    """Yield the URL of a server with this response, and the keys that it received.

    It answers nothing before `until`.
    """
    keys: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if until is not None:
                until.wait()
            keys.append(self.headers["authorization"])
            self.send_response(status if self.path == "/loads" else 404)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", keys
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
