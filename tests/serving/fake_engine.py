"""An engine without a model: a thread that publishes scripted tokens."""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cluster.engine.stats import EngineStats
from cluster.scheduling.event import ChainEvent, TokenEvent
from cluster.scheduling.stats import SchedulerStats, SpeculationStats
from pagedray.batch import PromptLogprobs, TokenLogprobs
from pagedray.config import KernelReport
from pagedray.errors import OverloadedError
from pagedray.request import FinishReason, Request
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.serving.engine_client import EngineClient
    from pagedray.errors import EngineError, PagedRayError
    from tests.serving.conftest import Server

__all__ = ["FakeEngine", "failing_sequence"]


@dataclass(eq=False)
class _Sequence:
    request: Request
    index: int
    script: list[int]
    num_sent: int = 0
    started_s: float = field(default_factory=time.monotonic)


@dataclass
class Log:
    """The calls that the engine received."""

    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    finished: list[tuple[str, int]] = field(default_factory=list)


class FakeEngine:
    """Publishes one scripted token of every sequence per step."""

    def __init__(self, sink: EngineClient, script: Callable[[Request, int], list[int]]) -> None:
        self._sink = sink
        self._default_script = script
        self._lock = threading.Lock()
        self._sequences: list[_Sequence] = []
        self._is_stopping = False
        self._wakes = threading.Event()
        self.reset()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        """Reset everything that a test has set or observed."""
        with self._lock:
            self._sequences.clear()
        self.log = Log()
        self.script = self._default_script
        self.rejection: PagedRayError | None = None
        self.step_s = 0.0
        self.is_paused = False
        self.most_tokens: int | None = None
        """Sequences with as many tokens wait; None if none does."""
        self.waits_for_reader = True
        """Whether a call gets a token once it has read the one before, so that none is merged."""
        self.is_healthy_flag = True
        self._error: EngineError | None = None
        self.num_cached_tokens = 0
        self.describing_index, self.describing_token = 0, 1
        """The event that describes the prompt: the sequence, and the number of its token."""

    def stop(self) -> None:
        self._is_stopping = True
        self._wakes.set()
        self._thread.join()

    @property
    def num_sequences(self) -> int:
        with self._lock:
            return len(self._sequences)

    @property
    def is_healthy(self) -> bool:
        return self.is_healthy_flag

    def check_room(self, tenant: str, num_tokens: int) -> None:
        if isinstance(self.rejection, OverloadedError):
            raise self.rejection

    def submit_request(self, request: Request) -> None:
        if self.rejection is not None:
            raise self.rejection
        with self._lock:
            self.log.submitted.append(request)
            self._sequences += [
                _Sequence(
                    request, index, self.script(request, index), _num_generated(request, index)
                )
                for index in request.open_indices
            ]
        self._wakes.set()

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        raise AssertionError(texts)

    def abort_request(self, request_id: str) -> None:
        with self._lock:
            self.log.aborted.append(request_id)
            self._sequences = [one for one in self._sequences if one.request.id != request_id]

    def finish_sequence(self, request_id: str, index: int) -> None:
        with self._lock:
            self.log.finished.append((request_id, index))
            self._sequences = [
                one for one in self._sequences if (one.request.id, one.index) != (request_id, index)
            ]

    @property
    def error(self) -> EngineError | None:
        return self._error

    def stats(self) -> EngineStats:
        scheduler = SchedulerStats(
            num_running=self.num_sequences,
            num_waiting=0,
            num_queued_requests=0,
            num_blocks=64,
            num_free_blocks=60,
            num_cached_blocks=2,
            num_cpu_blocks=32,
            num_free_cpu_blocks=32,
            num_queried_tokens=10,
            speculation=SpeculationStats(5, 20, (4, 2, 1)),
            num_hit_tokens=4,
            num_swap_preemptions=1,
            num_recompute_preemptions=2,
            num_scheduled_tokens=100,
            num_steps=7,
        )
        return EngineStats(
            scheduler=scheduler,
            num_steps=7,
            last_step_s=0.001,
            num_prompt_tokens=50,
            num_generated_tokens=50,
            block_bytes=4096,
            kernels=KernelReport(
                "torch_sdpa", {"decode": {"native": 3, "torch": 1}}, replaced=("skinny",)
            ),
        )

    def fail_all(self, error: EngineError) -> None:
        """Die with this error."""
        self.is_healthy_flag = False
        self._error = error
        self.rejection = error
        with self._lock:
            self._sequences.clear()
        self._sink.fail_all(error)

    def _loop(self) -> None:
        while not self._is_stopping:
            if not self._sequences:
                # A server runs until the last test has ended.
                self._wakes.wait()
                self._wakes.clear()
            time.sleep(self.step_s)
            with self._lock:
                running = [one for one in self._sequences if self._may_step(one)]
                events = [self._step(one) for one in running]
                for one, event in zip(running, events, strict=True):
                    if event.finish_reason is not None:
                        self._sequences.remove(one)
            if events:
                self._sink.publish(events)
                self._wait_for_delivery()
            else:
                time.sleep(0.0005)

    def _wait_for_delivery(self) -> None:
        """Wait until the event loop has passed on what was published."""
        is_delivered = threading.Event()
        with suppress(RuntimeError):
            self._sink._loop.call_soon_threadsafe(is_delivered.set)
            while not (self._is_stopping or is_delivered.wait(0.01)):
                pass

    def _may_step(self, sequence: _Sequence) -> bool:
        has_all = self.most_tokens is not None and sequence.num_sent >= self.most_tokens
        stream = self._sink._streams.get(sequence.request.id)
        is_unread = self.waits_for_reader and stream is not None and bool(stream._pending)
        return not (self.is_paused or has_all or is_unread)

    def _step(self, sequence: _Sequence) -> TokenEvent:
        request = sequence.request
        sampling = request.sampling
        token_id = sequence.script[sequence.num_sent % len(sequence.script)]
        sequence.num_sent += 1
        eos = () if sampling.ignore_eos else request.eos_token_ids
        stops = token_id in (*eos, *sampling.stop_token_ids)
        reason = None
        if stops and sequence.num_sent > sampling.min_tokens:
            reason = FinishReason.STOP
        elif sequence.num_sent >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        # A prompt is computed again where its request continues.
        num_told = sequence.num_sent - _num_generated(request, sequence.index)
        event = TokenEvent(
            request.id,
            sequence.index,
            (token_id,),
            () if sampling.logprobs is None else (_logprobs(token_id, sampling.logprobs),),
            reason,
            token_id if reason is FinishReason.STOP else None,
            self.num_cached_tokens,
            len(request.prompt_token_ids),
            sequence.started_s,
            prompt_logprobs=_prompt_logprobs(request)
            if (sequence.index, num_told) == (self.describing_index, self.describing_token)
            else (),
        )
        if not request.prediction:
            return event
        # As if each step accepted two tokens of the prediction and refused another.
        return ChainEvent(**msgspec.structs.asdict(event), num_accepted=2, num_refused=1)


def _num_generated(request: Request, index: int) -> int:
    return len(request.generated_token_ids[index] or ()) if request.generated_token_ids else 0


def _prompt_logprobs(request: Request) -> tuple[PromptLogprobs, ...]:
    width, count = request.sampling.prompt_logprobs, len(request.prompt_token_ids) - 1
    if width is None or not count:
        return ()
    return (
        PromptLogprobs(
            row=0,
            first_position=1,
            num_likeliest=width,
            chosen=array("f", [-0.5] * count).tobytes(),
            ranks=array("i", [1] * count).tobytes(),
            token_ids=array("i", [*range(100, 100 + width)] * count).tobytes(),
            logprobs=array("f", [-0.5] * width * count).tobytes(),
        ),
    )


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    others = [token_id, *(100 + number for number in range(num_top))][:num_top]
    return TokenLogprobs(-0.5, others, [-0.5 - number for number in range(num_top)])


@contextmanager
def failing_sequence(
    server: Server, *token_ids: int, error: str = "", is_lethal: bool = False
) -> Iterator[None]:
    """Let the first sequence of the next request fail after some tokens, all in one step."""
    server.engine.is_paused = True
    submitted = server.engine.log.submitted

    def fail() -> None:
        wait_for(lambda: bool(submitted))
        request_id = submitted[0].id
        events = [TokenEvent(request_id, 0, (token_id,)) for token_id in token_ids]
        end = TokenEvent(
            request_id, 0, finish_reason=FinishReason.ERROR, error=error, is_lethal=is_lethal
        )
        server.client.publish([*events, end])

    thread = threading.Thread(target=fail)
    thread.start()
    try:
        yield
    finally:
        thread.join()
