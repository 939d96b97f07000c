"""Schedules texts to embed: each request is a sequence that ends without a token.

A step has whole texts of several requests, since a text is never split, and no blocks. Vectors
survive the death of the ranks that computed them.
"""

from __future__ import annotations

from array import array
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import TYPE_CHECKING

import numpy as np

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.plan_builder import PlanBuilder
from cluster.scheduling.scheduler import Admission, PreparedPrompt, Scheduler
from cluster.scheduling.sequence import Waiting
from pagedray.batch import Pooling, TextBatch
from pagedray.errors import DeadlineError, LethalRequestError, PagedRayError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import StepOutput
    from pagedray.config import EngineConfig
    from pagedray.errors import EngineError

__all__ = ["EmbeddingRequest", "EmbeddingScheduler"]

_SAMPLING = SamplingParams(max_tokens=2**16)
"""A bound of the steps of a request, each with at least one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A validated request to embed texts."""

    texts: tuple[tuple[int, ...], ...]
    """Token ids by text, at least one id per text."""
    pooling: Pooling
    is_normalized: bool = True
    size: int
    """Number of leading elements of each vector to return."""
    num_first_type: tuple[int, ...] = ()
    """The tokens of type 0 of each pair of texts, as in `TextBatch`."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the engine, relative to other tenants."""
    deadline_s: float | None = None
    """When the request is aborted, on the monotonic clock."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts together."""
        return sum(map(len, self.texts))


class EmbeddingJob:
    """An open request and the texts of it that are not embedded yet."""

    __slots__ = ("answer", "is_probe", "num_steps", "request", "texts", "undone", "vectors")

    def __init__(
        self, texts: EmbeddingRequest, request: Request, *, is_probe: bool = False
    ) -> None:
        """`request` is the request to the scheduler; a step has at most one text of a probe."""
        self.texts = texts
        self.is_probe = is_probe
        self.request = request
        self.answer: Future[NDArray[np.float32]] = Future()
        self.vectors = np.zeros((len(texts.texts), texts.size), dtype=np.float32)
        self.undone = list(range(len(texts.texts)))
        """The shortest text last, since texts of equal length are computed together."""
        self.undone.sort(key=self.length, reverse=True)
        self.num_steps = 0
        """Steps that embedded some of its texts."""

    @property
    def kind(self) -> tuple[Pooling, bool]:
        """The parameters that all texts of a step share."""
        return self.texts.pooling, self.texts.is_normalized

    def length(self, index: int) -> int:
        """Return the number of tokens of a text."""
        return len(self.texts.texts[index])

    def put_back(self, index: int) -> None:
        """Return a text to the texts that are not embedded yet."""
        self.undone.append(index)
        self.undone.sort(key=self.length, reverse=True)

    def keep_vector(self, index: int, vector: NDArray[np.float32]) -> None:
        """Keep the leading elements of a text's vector, normalized again if requested."""
        size = self.texts.size
        part = vector[:size]
        if size < len(vector) and self.texts.is_normalized:
            part = part / (float(np.linalg.norm(part)) or 1.0)
        self.vectors[index] = part

    def resolve(self, error: PagedRayError | None) -> None:
        """Set the result, unless it was cancelled."""
        if not self.answer.set_running_or_notify_cancel():
            return
        if error is None:
            self.answer.set_result(self.vectors)
        else:
            self.answer.set_exception(error)


class EmbeddingScheduler(Scheduler):
    """A scheduler of requests to embed texts, and the sink of its own events."""

    # Texts that arrive during a step are computed together in the next step.
    max_plans_in_flight = 1

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(
            config=replace(config.scheduler, itl_target_ms=None),
            kv=KvOptions(
                block_size=config.cache.block_size,
                num_blocks=0,
                num_cpu_blocks=0,
                enable_prefix_cache=False,
            ),
            max_model_len=config.max_model_len,
        )
        self._admission = _TextAdmission(self._kv, self._backlog, max_model_len=0)
        self._numbers = count()
        self._jobs: dict[str, EmbeddingJob] = {}
        self._batch: list[tuple[EmbeddingJob, int]] = []
        """The texts of the step in flight by job and index, the shortest first."""

    def open_job(self, texts: EmbeddingRequest) -> EmbeddingJob:
        """Return the job of texts; its request is to be added. May be called from any thread."""
        request = Request(
            id=f"texts-{next(self._numbers)}",
            prompt_token_ids=tuple(chain.from_iterable(texts.texts)),
            sampling=_SAMPLING,
            seed=0,
            tenant=texts.tenant,
            weight=texts.weight,
            deadline_s=texts.deadline_s,
        )
        job = self._jobs[request.id] = EmbeddingJob(texts, request)
        return job

    def forget_job(self, job: EmbeddingJob) -> None:
        """Forget a job with a request that was rejected."""
        self._jobs.pop(job.request.id, None)

    def add_request(self, request: Request, prepared: PreparedPrompt | None = None) -> None:
        """Queue a request: of `open_job`, or of the engine, which has a step for each token."""
        job = self._jobs.get(request.id)
        if job is None or job.request is not request:
            texts = (request.prompt_token_ids,) * request.sampling.max_tokens
            probe = EmbeddingRequest(texts=texts, pooling="mean", size=1)
            self._jobs[request.id] = EmbeddingJob(probe, request, is_probe=True)
        super().add_request(request, prepared)

    @property
    def num_running(self) -> int:
        """Texts in the step in flight."""
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        """Texts that are neither embedded nor in the step in flight."""
        return sum(len(self._jobs[request_id].undone) for request_id in self._table.requests)

    def in_flight_lengths(self) -> dict[str, dict[int, int]]:
        """Return the number of steps of the requests in flight, as the length of one sequence."""
        return self.lengths_of({job.request.id for job, _ in self._batch})

    def lengths_of(self, request_ids: Iterable[str]) -> dict[str, dict[int, int]]:
        """Return the number of steps of open requests, as the length of one sequence."""
        return {
            request_id: {0: self._jobs[request_id].num_steps}
            for request_id in request_ids
            if self.is_open(request_id)
        }

    def expire_requests(self, now_s: float) -> list[TokenEvent]:
        """End cancelled requests, and requests past their deadline."""
        events = super().expire_requests(now_s)
        for request_id, job in list(self._jobs.items()):
            if job.answer.cancelled():
                events += self.abort_request(request_id)
        return events

    def update(self, output: StepOutput) -> list[TokenEvent]:
        """Keep the vectors of the plan in flight, and return the ends of requests."""
        events = super().update(output)
        batch, self._batch = self._batch, []
        vectors = np.frombuffer(output.vectors, dtype=np.float32).reshape(len(batch), -1)
        for (job, index), vector in zip(batch, vectors, strict=True):
            job.keep_vector(index, vector)
        for job in {job: None for job, _ in batch}:
            job.num_steps += 1
            if not job.undone:
                events += [
                    self._outputs.end_sequence(sequence, FinishReason.STOP)
                    for sequence in self._table.unfinished(job.request.id)
                ]
        return events

    def reset(self, *, keeps_cpu_pool: bool = False) -> None:
        """Begin an epoch with new ranks: the texts in flight wait again."""
        for job, index in self._batch:
            job.put_back(index)
        self._batch = []
        super().reset(keeps_cpu_pool=keeps_cpu_pool)

    def publish(self, events: Sequence[TokenEvent]) -> None:
        """Resolve the jobs of requests that have ended."""
        for event in events:
            job = self._jobs.pop(event.request_id)
            error: PagedRayError | None = None
            if event.is_lethal:
                error = LethalRequestError()
            elif event.finish_reason is FinishReason.ABORT:
                error = DeadlineError("The deadline passed before the texts were embedded.")
            job.resolve(error)

    def fail_all(self, error: EngineError) -> None:
        """Resolve every job with `error`."""
        for job in list(self._jobs.values()):
            job.resolve(error)

    def _plan_step(self) -> PlanBuilder:
        """Return the texts of the next step, at least one, within the token budget."""
        table, batch = self._table, self._batch
        num_left = self._max_num_tokens
        while table.waiting:
            sequence = table.waiting.first
            job = self._jobs[sequence.request_id]
            if batch and job.kind != batch[0][0].kind:
                break
            num_before = num_left
            num_left = self._take_texts(job, num_left)
            if num_left == num_before:
                break
            table.waiting.charge(
                sequence.share, (num_before - num_left) * sequence.active.token_cost
            )
            table.start_sequence(sequence, copies_step=None)
            if job.undone:
                table.preempt_sequence(sequence, Waiting())
                break
        builder = PlanBuilder(self._step)
        if batch:
            batch.sort(key=lambda entry: entry[0].length(entry[1]))
            builder.texts = _text_batch(batch)
        return builder

    def _take_texts(self, job: EmbeddingJob, num_left: int) -> int:
        """Add texts of a job to the batch; return how many tokens of `num_left` remain."""
        batch = self._batch
        while job.undone:
            length = job.length(job.undone[-1])
            is_full = length > num_left or len(batch) == self._table.num_rows
            if batch and (is_full or job.is_probe):
                break
            batch.append((job, job.undone.pop()))
            num_left -= length
        return num_left


class _TextAdmission(Admission):
    """Accepts texts, which their validator has checked, while the queue has room."""

    def read_prompt(self, request: Request) -> array[int]:
        """Return no tokens: the texts have them."""
        return array("I")

    def check_request(self, request: Request) -> None:
        """Raise OverloadedError if the queue is full."""
        self._backlog.check_room(request.tenant, len(request.prompt_token_ids))


def _text_batch(batch: list[tuple[EmbeddingJob, int]]) -> TextBatch:
    pooling, is_normalized = batch[0][0].kind
    typed = [(job.texts.num_first_type, index) for job, index in batch]
    return TextBatch(
        [list(job.texts.texts[index]) for job, index in batch],
        pooling,
        is_normalized,
        [num_first_type[index] for num_first_type, index in typed if num_first_type],
    )
