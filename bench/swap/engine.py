"""An engine in this process, and the times of its tokens."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.local_executor import LocalExecutor
from cluster.engine.open_engine import open_engine
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from workers.decoder_worker import DecoderWorker

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.stats import SchedulerStats
    from pagedray.errors import EngineError

__all__ = ["MeasuredEngine", "Reply", "measured_engine", "wait_until_pinned"]


class Reply:
    """When a request was submitted, and when its tokens came."""

    def __init__(self) -> None:
        self.submitted_s = time.perf_counter()
        self.first_token_s = 0.0
        self.ended_s = 0.0
        self.token_ids: list[int] = []

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token."""
        return self.first_token_s - self.submitted_s


class MeasuredEngine:
    """Submits requests of token ids, and receives their tokens."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:  # Any: engine options
        self._replies: dict[str, Reply] = {}
        self._num_open = 0
        self._num_submitted = 0
        self._error: EngineError | None = None
        self._changed = threading.Condition()
        started_s = time.perf_counter()
        config = engine_config(
            folder, EngineOptions(executor="local", load_format="dummy", **options)
        )
        engine = open_engine(config, self, lambda what, part: None)
        assert isinstance(engine, EngineLoop)
        self._engine = engine
        self.start_s = time.perf_counter() - started_s
        """Seconds until requests are accepted."""
        executor = engine._executor
        assert isinstance(executor, LocalExecutor)
        assert isinstance(executor._worker, DecoderWorker)
        self.pin_s = wait_until_pinned(executor._worker)
        """Seconds from then until the CPU pool is pinned."""

    def submit(self, token_ids: Sequence[int], num_new_tokens: int) -> Reply:
        """Submit a request that generates this many tokens."""
        with self._changed:
            self._num_submitted += 1
            self._num_open += 1
            number = self._num_submitted
            reply = self._replies[f"{number:032x}"] = Reply()
        self._engine.submit_request(
            Request(
                id=f"{number:032x}",
                prompt_token_ids=tuple(token_ids),
                sampling=SamplingParams(
                    max_tokens=num_new_tokens, ignore_eos=True, temperature=0.0
                ),
                seed=number,
            )
        )
        return reply

    def wait(self, timeout_s: float, *, num_open: int = 0) -> bool:
        """Wait until at most this many requests are open; return whether that is so."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open <= num_open, max(timeout_s, 0.0))
            if self._error is not None:
                raise self._error
            return self._num_open <= num_open

    def abort_all(self) -> None:
        """End all open requests."""
        for request_id, reply in list(self._replies.items()):
            if not reply.ended_s:
                self._engine.abort_request(request_id)

    def stats(self) -> SchedulerStats:
        return self._engine.stats().scheduler

    def close(self) -> None:
        self._engine.close()

    def publish(self, events: Sequence[TokenEvent]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            for event in events:
                reply = self._replies[event.request_id]
                reply.token_ids += event.token_ids
                if event.token_ids and not reply.first_token_s:
                    reply.first_token_s = now_s
                if event.finish_reason is not None:
                    reply.ended_s = now_s
                    self._num_open -= 1
                    self._changed.notify_all()

    def fail_all(self, error: EngineError) -> None:
        with self._changed:
            self._error, self._num_open = error, 0
            self._changed.notify_all()


@contextmanager
def measured_engine(
    folder: Path,
    **options: Any,  # Any: engine options
) -> Iterator[MeasuredEngine]:
    """Open an engine, and close it at the end."""
    engine = MeasuredEngine(folder, options)
    try:
        yield engine
    finally:
        engine.close()


def wait_until_pinned(worker: DecoderWorker) -> float:
    """Wait until a rank's CPU pool is pinned; return how many seconds that took."""
    started_s = time.perf_counter()
    if worker.host_pool is not None:
        worker.host_pool.wait_until_pinned()
    return time.perf_counter() - started_s
