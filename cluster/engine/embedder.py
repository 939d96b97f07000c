"""Embeds texts: an encoder over an executor.

Texts are independent and finish in a single step, so that only their order and the number that
fit into a step are scheduled. A step holds texts of several requests. One thread runs steps; any
thread may submit.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from cluster.engine.embedding_job import EmbeddingJob
from cluster.engine.stats import EngineStats
from cluster.engine.step_loop import StepLoop
from cluster.scheduling.backlog import Backlog
from cluster.scheduling.fair_queue import FairQueue
from cluster.scheduling.stats import SchedulerStats
from pagedray.batch import EmbedPlan
from pagedray.errors import (
    DeadlineError,
    EngineError,
    PagedRayError,
    StartupError,
    WorkerError,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.engine.executor import Executor
    from pagedray.config import EngineConfig

__all__ = ["Embedder"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_FATAL_DEATHS_IN_A_ROW = 6
"""Deaths of groups without a step between them that end the engine: a batch that fails has killed
two, so this is three batches."""
_STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Embedder(StepLoop):
    """One replica of an encoder, with a fair queue."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        super().__init__(executor, _STEP_BOUNDS_S)
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._max_num_tokens = config.scheduler.max_num_batched_tokens
        self._hidden_size = config.model.hidden_size
        self._backlog = Backlog(
            max_requests=config.scheduler.max_queued_requests,
            max_tokens=config.scheduler.max_queued_tokens,
        )
        self._waiting = FairQueue[EmbeddingJob]()
        self._jobs: dict[EmbeddingJob, None] = {}
        self._is_broken = False
        self._num_arrivals = 0
        self._next_step = 0
        self._num_running = 0
        self._num_prompt_tokens = 0

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for so many more tokens."""
        self._backlog.check_room(tenant, num_tokens)

    def submit_request(self, request: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        """Accept a request; the answer is `[num_texts, size]`. Cancelling it aborts the request.

        Raises OverloadedError or EngineError.
        """
        with self._wake:
            self._check_open()
            self._backlog.check_room(request.tenant, request.num_tokens)
            self._backlog.add_request(request.tenant, request.num_tokens)
            share = self._waiting.open_share(request.tenant)
            job = EmbeddingJob(request, self._num_arrivals, share)
            self._num_arrivals += 1
            self._num_prompt_tokens += request.num_tokens
            self._jobs[job] = None
            self._waiting.insert(job)
            self._wake.notify()
        return job.answer

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters; a text in a step counts as a running sequence."""
        with self._wake:
            scheduler = SchedulerStats(
                num_running=self._num_running,
                num_waiting=sum(len(job.undone) for job in self._jobs),
                num_queued_requests=self._backlog.num_requests,
                num_queued_tokens=self._backlog.num_tokens,
                num_scheduled_tokens=self._num_prompt_tokens,
                num_steps=self._num_steps,
            )
            return EngineStats(
                scheduler=scheduler,
                num_steps=self._num_steps,
                last_step_s=self._last_step_s,
                num_prompt_tokens=self._num_prompt_tokens,
                num_generated_tokens=0,
                block_bytes=self._executor.cache_size.block_bytes,
                attention_providers=self._executor.attention_providers,
                num_replacements=self._num_replacements,
                step_times=self._step_times.snapshot(),
            )

    def _turn(self) -> None:
        with self._wake:
            self._backlog.tick(time.monotonic())
            self._drop_ended(time.monotonic())
            batch = self._next_batch()
            self._num_running = len(batch)
            if not batch:
                self._wake.wait(_POLL_S)
                return
        try:
            vectors = self._run_twice(batch)
        except (WorkerError, StartupError) as error:
            self._is_broken = True
            if self._num_deaths >= _FATAL_DEATHS_IN_A_ROW:
                raise
            refusal = EngineError(f"The texts could not be embedded: {error}")
            with self._wake:
                for job in {job: None for job, _ in batch}:
                    self._leave(job, refusal)
            return
        with self._wake:
            for (job, index), vector in zip(batch, vectors, strict=True):
                job.vectors[index] = _cut(vector, job.request)
            for job in {job: None for job, _ in batch}:
                if not job.undone:
                    self._leave(job, None)

    def _drop_ended(self, now_s: float) -> None:
        """Drop cancelled requests, and end those past their deadline."""
        for job in tuple(self._jobs):
            deadline_s = job.request.deadline_s
            if job.answer.cancelled():
                self._leave(job, None)
            elif deadline_s is not None and deadline_s <= now_s:
                self._leave(
                    job, DeadlineError("The deadline passed before the texts were embedded.")
                )

    def _next_batch(self) -> list[tuple[EmbeddingJob, int]]:
        """Return the texts of the next step: as many as the token budget holds, at least one."""
        batch: list[tuple[EmbeddingJob, int]] = []
        num_tokens = 0
        while self._waiting:
            job = self._waiting.first
            if batch and job.kind != batch[0][0].kind:
                break
            num_taken = 0
            while job.undone:
                length = len(job.request.texts[job.undone[-1]])
                if batch and (
                    num_tokens + num_taken + length > self._max_num_tokens
                    or len(batch) == self._max_num_seqs
                ):
                    break
                batch.append((job, job.undone.pop()))
                num_taken += length
            num_tokens += num_taken
            if num_taken:
                self._start(job, num_taken)
            if job.undone:
                break
            self._waiting.remove(job)
        batch.sort(key=lambda entry: len(entry[0].request.texts[entry[1]]))
        return batch

    def _start(self, job: EmbeddingJob, num_tokens: int) -> None:
        self._waiting.charge(job.share, num_tokens / job.request.weight)
        if not job.has_started:
            job.has_started = True
            self._backlog.start_request(job.request.tenant, job.request.num_tokens)

    def _leave(self, job: EmbeddingJob, error: PagedRayError | None) -> None:
        """Remove a job and resolve it."""
        del self._jobs[job]
        if job.undone:
            self._waiting.remove(job)
        if not job.has_started:
            self._backlog.drop_request(job.request.tenant, job.request.num_tokens)
        self._waiting.close_share(job.share)
        job.resolve(error)

    def _run_twice(self, batch: list[tuple[EmbeddingJob, int]]) -> NDArray[np.float32]:
        """Return the vectors of texts; if the ranks die, try once more with new ones."""
        try:
            if self._is_broken:
                self._replace_ranks()
            return self._run(batch)
        except WorkerError as error:
            self._num_deaths += 1
            logger.warning("%s Replacing ranks.", error)
        self._replace_ranks()
        try:
            return self._run(batch)
        except WorkerError:
            self._num_deaths += 1
            raise

    def _replace_ranks(self) -> None:
        self._is_replacing = True
        self._num_replacements += 1
        self._executor.restart_ranks()
        self._next_step = 0
        self._is_replacing = self._is_broken = False

    def _run(self, batch: list[tuple[EmbeddingJob, int]]) -> NDArray[np.float32]:
        began_s = time.perf_counter()
        pooling, is_normalized = batch[0][0].kind
        token_ids = [list(job.request.texts[index]) for job, index in batch]
        plan = EmbedPlan(self._next_step, token_ids, pooling, is_normalized)
        self._next_step += 1
        output = self._executor.embed_texts(plan)
        self._count_step(time.perf_counter() - began_s)
        return np.frombuffer(output.vectors, dtype=np.float32).reshape(-1, self._hidden_size)

    def _end_requests(self, error: EngineError) -> None:
        with self._wake:
            for job in tuple(self._jobs):
                del self._jobs[job]
                job.resolve(error)


def _cut(vector: NDArray[np.float32], request: EmbeddingRequest) -> NDArray[np.float32]:
    """Return the leading elements of a vector, normalized again if requested."""
    if request.size == len(vector):
        return vector
    part = vector[: request.size]
    length = float(np.linalg.norm(part))
    return part / length if request.is_normalized and length > 0.0 else part
