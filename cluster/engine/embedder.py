"""Runs a model that embeds texts, on the ranks of an executor.

Texts are independent and finish in a single step, so that only their order and the number that
fit into a step are scheduled. A step holds texts of several requests. One thread runs steps; any
thread may submit.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from cluster.engine.crash_search import CrashingRequests, CrashSearch
from cluster.engine.embedding_job import EmbeddingJob
from cluster.engine.stats import EngineStats
from cluster.engine.step_loop import StepLoop
from cluster.scheduling.fair_queue import Backlog, FairQueue
from cluster.scheduling.stats import SchedulerStats
from pagedray.batch import EmbedPlan
from pagedray.errors import (
    DeadlineError,
    EngineError,
    LethalRequestError,
    PagedRayError,
    WorkerError,
)
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from cluster.engine.crash_search import DeathBudget
    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.engine.executor import Executor
    from pagedray.config import EngineConfig

    _Batch = list[tuple[EmbeddingJob, int]]
    """Texts by job and index, shortest first."""

__all__ = ["Embedder"]

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Embedder(StepLoop):
    """One replica of a model that embeds, with a fair queue."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        death_budget: DeathBudget | None = None,
    ) -> None:
        super().__init__(executor, _STEP_BOUNDS_S, death_budget)
        self._max_num_seqs = config.max_num_seqs
        self._max_num_tokens = config.max_num_batched_tokens
        self._vector_size = config.model.vector_size
        self._backlog = Backlog(
            max_requests=config.scheduler.max_queued_requests,
            max_tokens=config.scheduler.max_queued_tokens,
        )
        self._waiting = FairQueue[EmbeddingJob]()
        self._jobs: dict[EmbeddingJob, None] = {}
        self._search = CrashSearch()
        self._crashing = CrashingRequests()
        self._num_crashing = 0
        self._num_arrivals = 0
        self._next_step = 0
        self._batch: _Batch = []
        """The texts of the running step."""
        self._num_prompt_tokens = 0

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for this many more tokens."""
        self._backlog.check_room(tenant, num_tokens)

    def submit_request(self, request: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        """Accept a request; the result is `[num_texts, size]`. Cancelling it aborts the request.

        Raises OverloadedError, LethalRequestError or EngineError.
        """
        with self._lock:
            self._check_open()
            if self._crashing:
                self._crashing.check(request.texts, request.tenant, self._clock.now_s())
            self._backlog.check_room(request.tenant, request.num_tokens)
            self._backlog.add_request(request.tenant, request.num_tokens)
            share = self._waiting.open_share(request.tenant)
            job = EmbeddingJob(request, self._num_arrivals, share)
            self._num_arrivals += 1
            self._num_prompt_tokens += request.num_tokens
            self._jobs[job] = None
            if self._search.may_run(job.id):
                self._waiting.insert(job)
            else:
                job.is_quarantined = True
            self._lock.notify()
        return job.answer

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters; a text in a step counts as a running sequence."""
        with self._lock:
            scheduler = SchedulerStats(
                max_num_seqs=self._max_num_seqs,
                max_num_batched_tokens=self._max_num_tokens,
                num_running=len(self._batch),
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
                kernels=self._executor.kernels,
                replacements=dict(self._replacements),
                num_hangs=dict(self._num_hangs),
                num_lethal_requests=self._num_crashing,
                step_times=self._step_times.snapshot(),
            )

    @property
    def _has_work(self) -> bool:
        return bool(self._jobs)

    @property
    def _num_open(self) -> int:
        return len(self._jobs)

    def _iterate(self) -> None:
        try:
            if self._search.isolated is not None:
                self._prove_ranks()
            else:
                self._step()
        except WorkerError as error:
            self._replace_ranks(error)

    def _prove_ranks(self) -> None:
        """Embed a text of the engine itself for longer than the isolated request ran."""
        for _ in range(self._search.num_probe_tokens):
            self._run(EmbedPlan(self._next_step, [[0]], "mean", is_normalized=True))
        with self._lock:
            crashing_id = self._search.confirm_crash()
            for job in [job for job in self._jobs if job.id == crashing_id]:
                self._end_crashing(job)
            self._examine(has_changed=True)

    def _step(self) -> None:
        with self._lock:
            self._backlog.tick(self._clock.now_s())
            self._drop_ended(self._clock.now_s())
            batch = self._batch = self._next_batch()
            if not batch:
                self._lock.wait(_POLL_S)
        if not batch:
            # Reading it raises WorkerError if idle ranks have died or hang.
            _ = self._executor.acknowledged_step
            return
        vectors = self._run(self._plan_of(batch))
        with self._lock:
            self._batch = []
            for (job, index), vector in zip(batch, vectors, strict=True):
                job.vectors[index] = _cut(vector, job.request)
            for job in {job: None for job, _ in batch}:
                job.num_steps += 1
                # The engine may have failed meanwhile, which ends all jobs.
                if not job.undone and job in self._jobs:
                    self._leave(job, None)
            if self._search.are_any:
                self._examine()

    def _drop_ended(self, now_s: float) -> None:
        """Drop cancelled requests, and end requests past their deadline."""
        for job in tuple(self._jobs):
            deadline_s = job.request.deadline_s
            if job.answer.cancelled():
                self._leave(job, None)
            elif deadline_s is not None and deadline_s <= now_s:
                self._leave(
                    job, DeadlineError("The deadline passed before the texts were embedded.")
                )

    def _next_batch(self) -> _Batch:
        """Return the texts of the next step, at least one, within the token budget."""
        batch: _Batch = []
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
        if job.undone and not job.is_quarantined:
            self._waiting.remove(job)
        if not job.has_started:
            self._backlog.drop_request(job.request.tenant, job.request.num_tokens)
        self._waiting.close_share(job.share)
        job.resolve(error)

    def _note_death(self) -> bool:
        has_narrowed = self._search.note_death(self._put_back(), self._next_step)
        self._examine(has_changed=True)
        return has_narrowed

    def _begin_epoch(self, damaged: Sequence[int] | None) -> None:
        self._next_step = 0

    def _put_back(self) -> dict[str, dict[int, int]]:
        """Make the texts of the running step wait again; return their jobs' steps."""
        batch, self._batch = self._batch, []
        ran: dict[str, dict[int, int]] = {}
        for job, index in batch:
            if job not in self._jobs:
                continue
            ran[job.id] = {0: job.num_steps}
            if not job.undone and not job.is_quarantined:
                self._waiting.insert(job)
            job.put_back(index)
        return ran

    def _end_crashing(self, job: EmbeddingJob) -> None:
        logger.error(
            "A request to embed %s ended with an error: the ranks died whenever it ran, and work "
            "without it.",
            pluralize(len(job.undone), "text"),
        )
        self._num_crashing += 1
        self._crashing.note_request(job.request.texts, job.request.tenant, self._clock.now_s())
        self._leave(job, LethalRequestError())

    def _examine(self, *, has_changed: bool = False) -> None:
        """Note how far the suspects are, and decide which jobs run."""
        search = self._search
        num_steps = {job.id: {0: job.num_steps} for job in self._jobs}
        if search.note_lengths(num_steps) or has_changed:
            for job in self._jobs:
                self._quarantine(job, is_quarantined=not search.may_run(job.id))

    def _quarantine(self, job: EmbeddingJob, *, is_quarantined: bool) -> None:
        if is_quarantined == job.is_quarantined:
            return
        job.is_quarantined = is_quarantined
        # A job without texts left is in the running step.
        if job.undone and is_quarantined:
            self._waiting.remove(job)
        elif job.undone:
            self._waiting.insert(job)

    def _plan_of(self, batch: _Batch) -> EmbedPlan:
        pooling, is_normalized = batch[0][0].kind
        token_ids = [list(job.request.texts[index]) for job, index in batch]
        num_first_type = [
            job.request.num_first_type[index] for job, index in batch if job.request.num_first_type
        ]
        return EmbedPlan(
            self._next_step, token_ids, pooling, is_normalized, num_first_type=num_first_type
        )

    def _run(self, plan: EmbedPlan) -> NDArray[np.float32]:
        """Return the vectors of a plan's texts. Raises WorkerError."""
        began_s = self._clock.now_s()
        self._next_step += 1
        output = self._executor.embed_texts(plan)
        self._count_step(self._clock.now_s() - began_s)
        return np.frombuffer(output.vectors, dtype=np.float32).reshape(-1, self._vector_size)

    def _end_requests(self, error: EngineError) -> None:
        with self._lock_or_timeout():
            jobs, self._jobs = self._jobs, {}
            for job in jobs:
                job.resolve(error)


def _cut(vector: NDArray[np.float32], request: EmbeddingRequest) -> NDArray[np.float32]:
    """Return the leading elements of a vector, normalized again if requested."""
    if request.size == len(vector):
        return vector
    part = vector[: request.size]
    length = float(np.linalg.norm(part))
    return part / length if request.is_normalized and length > 0.0 else part
