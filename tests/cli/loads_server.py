"""A server that serves only `/loads` and its history."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.serving.server_info import CallInfo, ServerLoads
from cluster.serving.telemetry.load_history import Latency, LoadHistory, LoadSample
from tests.quiet_server import QuietHandler, serving_by

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

__all__ = ["HISTORY", "LOADS", "serving"]

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

HISTORY = LoadHistory(
    interval_s=5.0,
    num_blocks=200,
    # Five minutes, in which the generated tokens and the first tokens rise evenly.
    samples=tuple(
        LoadSample(
            uptime_s=5.0 * number,
            prompt_tokens_per_s=700.0,
            generated_tokens_per_s=100.0 * number,
            num_running=3,
            num_waiting=0,
            num_used_blocks=50,
            first_token_p50_s=0.1,
            first_token_p95_s=0.01 * number,
        )
        for number in range(1, 61)
    ),
    first_token=Latency(num_durations=1200, p50_s=0.25, p90_s=0.5, p99_s=1.75),
    between_tokens=Latency(num_durations=34_000, p50_s=0.012, p90_s=0.02, p99_s=0.03),
)


@contextmanager
def serving(
    body: bytes,
    status: int = 200,
    *,
    history: bytes | None = None,
    info: bytes | None = None,
    until: threading.Event | None = None,
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Yield the URL of a server with this response, and the paths and keys that it received.

    It answers nothing before `until`, and its history with status 403 if it is None.
    """
    received: list[tuple[str, str | None]] = []
    answers = {
        "/loads": (status, body),
        "/loads/history": (403, b"") if history is None else (200, history),
    }

    if info is not None:
        answers["/server_info"] = (200, info)

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if until is not None:
                until.wait()
            received.append((self.path, self.headers["authorization"]))
            self.answer(*answers.get(self.path, (404, b"")))

    with serving_by(Handler) as url:
        yield url, received
