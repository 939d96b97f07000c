"""The embedder: batches, deaths of ranks, deadlines and full queues."""

from __future__ import annotations

import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.engine.crash_search import DeathBudget
from cluster.engine.embedder import Embedder
from cluster.engine.embedding_job import EmbeddingRequest
from pagedray.batch import EmbedOutput, EmbedPlan
from pagedray.config import EngineConfig, SchedulerConfig
from pagedray.errors import (
    DeadlineError,
    EngineError,
    LethalRequestError,
    OverloadedError,
    ShuttingDownError,
    WorkerError,
)
from pagedray.model_config import ModelConfig
from tests.fakes import FakeExecutor, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagedray.batch import Pooling

MODEL = ModelConfig(
    name="tiny",
    folder=Path("tiny"),
    architecture="BertModel",
    vocab_size=50,
    hidden_size=2,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_size=2,
    max_positions=20,
    is_encoder=True,
    task="embed",
    num_token_types=2,
)
TIMEOUT_S = 60.0


class CountingExecutor(FakeExecutor):
    """Gives each text its length and its first token, once the gate is open."""

    def __init__(self, *, num_failures: int = 0, is_open: bool = True) -> None:
        super().__init__()
        self.plans: list[EmbedPlan] = []
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self._num_failures = num_failures

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        self.plans.append(plan)
        assert self.gate.wait(TIMEOUT_S)
        if self._num_failures:
            self._num_failures -= 1
            raise WorkerError("A rank died.")
        numbers = [number for ids in plan.token_ids for number in (len(ids), ids[0])]
        return EmbedOutput(plan.step, array("f", numbers).tobytes())


@pytest.fixture
def opened() -> Iterator[Callable[..., Embedder]]:
    """Return a function that opens an embedder, which is closed after the test."""
    embedders: list[tuple[Embedder, CountingExecutor]] = []

    def open_one(executor: CountingExecutor, **limits: int) -> Embedder:
        config = EngineConfig(model=MODEL, scheduler=SchedulerConfig(**limits))  # type: ignore[arg-type]  # the stubs are narrower than the library
        budget = DeathBudget(barren_s=0.0, first_pause_s=0.001, max_pause_s=0.001)
        embedder = Embedder(config, executor, death_budget=budget)
        embedder.start_steps()
        embedders.append((embedder, executor))
        return embedder

    yield open_one
    for embedder, executor in embedders:
        executor.gate.set()
        embedder.stop_steps()


def request(
    *texts: Sequence[int],
    pooling: Pooling = "mean",
    tenant: str = "",
    deadline_s: float | None = None,
    is_normalized: bool = False,
    size: int = 2,
    weight: float = 1.0,
) -> EmbeddingRequest:
    return EmbeddingRequest(
        texts=tuple(tuple(text) for text in texts),
        pooling=pooling,
        is_normalized=is_normalized,
        size=size,
        tenant=tenant,
        weight=weight,
        deadline_s=deadline_s,
    )


def lengths(executor: CountingExecutor) -> list[list[int]]:
    return [[len(ids) for ids in plan.token_ids] for plan in executor.plans]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def held(embedder: Embedder, executor: CountingExecutor) -> None:
    """Start a step that does not end before the gate opens."""
    embedder.submit_request(request([1]))
    wait_until(lambda: len(executor.plans) == 1)


def test_steps_hold_what_the_token_budget_allows_and_vectors_keep_their_order(
    opened: Callable[..., Embedder],
) -> None:
    executor = CountingExecutor()
    texts = [[first] * length for first, length in enumerate((3, 12, 1, 4, 3, 11))]
    embedder = opened(executor, max_num_batched_tokens=11)
    vectors = embedder.submit_request(request(*texts)).result(TIMEOUT_S)
    assert vectors.tolist() == [[float(len(ids)), float(ids[0])] for ids in texts]
    assert lengths(executor) == [[1, 3, 3, 4], [11], [12]]
    assert [plan.step for plan in executor.plans] == [0, 1, 2]
    assert embedder.stats().num_prompt_tokens == 34


def test_steps_hold_no_more_texts_than_rows(opened: Callable[..., Embedder]) -> None:
    executor = CountingExecutor()
    opened(executor, max_num_seqs=2).submit_request(request(*[[1]] * 5)).result(TIMEOUT_S)
    assert [len(plan.token_ids) for plan in executor.plans] == [2, 2, 1]


def test_a_step_holds_texts_of_several_calls_that_pool_alike(
    opened: Callable[..., Embedder],
) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    first = embedder.submit_request(request([2, 2]))
    second = embedder.submit_request(request([4], [5, 5, 5]))
    other = embedder.submit_request(request([3], pooling="cls"))
    executor.gate.set()
    assert first.result(TIMEOUT_S).tolist() == [[2.0, 2.0]]
    assert other.result(TIMEOUT_S).tolist() == [[1.0, 3.0]]
    assert second.result(TIMEOUT_S).tolist() == [[1.0, 4.0], [3.0, 5.0]]
    assert lengths(executor) == [[1], [1, 2, 3], [1]]


def test_one_text_of_another_tenant_does_not_wait_for_a_flood(
    opened: Callable[..., Embedder],
) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor, max_num_batched_tokens=10)
    held(embedder, executor)
    flood = [embedder.submit_request(request([6] * 10, tenant="many")) for _ in range(50)]
    one = embedder.submit_request(request([7] * 10, tenant="one"))
    executor.gate.set()
    assert one.result(TIMEOUT_S).tolist() == [[10.0, 7.0]]
    place = next(i for i, plan in enumerate(executor.plans) if plan.token_ids[0][0] == 7)
    assert place <= 2
    for answer in flood:
        answer.result(TIMEOUT_S)


def test_a_tenant_with_three_times_the_weight_has_three_times_as_many_tokens(
    opened: Callable[..., Embedder],
) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor, max_num_batched_tokens=10)
    held(embedder, executor)
    answers = [
        embedder.submit_request(request([first] * 10, tenant=str(first), weight=weight))
        for first, weight in ((6, 1.0), (7, 3.0)) * 40
    ]
    executor.gate.set()
    for answer in answers:
        answer.result(TIMEOUT_S)
    tenants = [plan.token_ids[0][0] for plan in executor.plans[1:41]]
    assert 28 <= tenants.count(7) <= 32


def test_tenants_without_calls_are_forgotten(opened: Callable[..., Embedder]) -> None:
    embedder = opened(CountingExecutor())
    for number in range(20):
        embedder.submit_request(request([1], tenant=f"tenant {number}")).result(TIMEOUT_S)
    # A tenant is remembered only until others were served as much.
    assert embedder._waiting.num_shares <= 1


def test_only_cut_vectors_that_were_normalized_are_again(opened: Callable[..., Embedder]) -> None:
    embedder = opened(CountingExecutor())
    vectors = embedder.submit_request(request([7, 7], size=1, is_normalized=True)).result(TIMEOUT_S)
    assert vectors.tolist() == [[1.0]]
    assert vectors.dtype == np.float32
    vectors = embedder.submit_request(request([7, 7], size=1)).result(TIMEOUT_S)
    assert vectors.tolist() == [[2.0]]


def test_texts_go_to_new_ranks_when_the_old_ones_die(opened: Callable[..., Embedder]) -> None:
    executor = CountingExecutor(num_failures=1)
    answer = opened(executor).submit_request(request([7, 7]))
    assert answer.result(TIMEOUT_S).tolist() == [[2.0, 7.0]]
    assert executor.num_restarts == 1
    assert [plan.step for plan in executor.plans] == [0, 0]


LETHAL = 49


class PoisonedExecutor(CountingExecutor):
    """Ranks that die of texts with one token from a step after each start on, or always."""

    def __init__(self, *, dies_always: bool = False, step: int = 0) -> None:
        super().__init__(is_open=False)
        self.dies_always = dies_always
        self.step = step
        self.num_deaths = 0

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        output = super().embed_texts(plan)
        is_lethal = plan.step >= self.step and any(LETHAL in ids for ids in plan.token_ids)
        if self.dies_always or is_lethal:
            self.num_deaths += 1
            raise WorkerError("A rank died.")
        return output


@pytest.mark.parametrize("poisons", [{0}, {5}, {15}, {3, 4, 12}])
def test_texts_that_kill_their_ranks_fail_alone(
    opened: Callable[..., Embedder], poisons: set[int]
) -> None:
    executor = PoisonedExecutor()
    embedder = opened(executor)
    held(embedder, executor)
    answers = [
        embedder.submit_request(request([7], [LETHAL if index in poisons else 8, 9]))
        for index in range(16)
    ]
    executor.gate.set()
    failed = {i for i, answer in enumerate(answers) if answer.exception(TIMEOUT_S) is not None}
    assert failed == poisons
    assert all(isinstance(answers[i].exception(), LethalRequestError) for i in failed)
    assert answers[1].result().tolist() == [[1.0, 7.0], [2.0, 8.0]]
    assert executor.num_deaths <= len(poisons) * (3 + 4)
    assert embedder.stats().num_lethal_requests == len(poisons)
    assert embedder.stats().scheduler.num_queued_requests == 0


@pytest.mark.parametrize("step", range(1, 6))
def test_texts_that_kill_some_steps_after_each_start_fail_alone(
    opened: Callable[..., Embedder], step: int
) -> None:
    executor = PoisonedExecutor(step=step)
    embedder = opened(executor, max_num_seqs=4)
    held(embedder, executor)
    innocent = [embedder.submit_request(request(*[[7]] * 30)) for _ in range(3)]
    lethal = embedder.submit_request(request(*[[LETHAL]] * 200))
    executor.gate.set()
    assert isinstance(lethal.exception(TIMEOUT_S), LethalRequestError)
    assert all(answer.exception(TIMEOUT_S) is None for answer in innocent)
    assert executor.num_deaths <= 4 + 2


def test_a_lethal_request_that_is_alone_fails_after_three_deaths(
    opened: Callable[..., Embedder],
) -> None:
    executor = PoisonedExecutor()
    executor.gate.set()
    embedder = opened(executor)
    with pytest.raises(LethalRequestError):
        embedder.submit_request(request([LETHAL])).result(TIMEOUT_S)
    # Its texts are rejected when they come again.
    with pytest.raises(LethalRequestError):
        embedder.submit_request(request([LETHAL]))
    assert executor.num_deaths == 3
    assert embedder.submit_request(request([7])).result(TIMEOUT_S).tolist() == [[1.0, 7.0]]
    assert embedder.is_healthy


def test_deaths_without_a_step_between_end_the_engine(opened: Callable[..., Embedder]) -> None:
    executor = PoisonedExecutor(dies_always=True)
    embedder = opened(executor)
    answers = [embedder.submit_request(request([7])) for _ in range(3)]
    executor.gate.set()
    errors = [answer.exception(TIMEOUT_S) for answer in answers]
    assert all(isinstance(error, EngineError) for error in errors)
    assert "without finishing a step" in str(errors[-1])
    with pytest.raises(EngineError, match="has stopped"):
        embedder.submit_request(request([7]))
    assert not embedder.is_healthy


def test_stopping_waits_for_the_running_step(opened: Callable[..., Embedder]) -> None:
    # Afterwards, its ranks end.
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    threading.Timer(0.05, executor.gate.set).start()
    embedder.stop_steps(timeout_s=TIMEOUT_S)
    assert not embedder._thread.is_alive()


def test_late_and_cancelled_texts_never_run(opened: Callable[..., Embedder]) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    late = embedder.submit_request(request([8], deadline_s=time.monotonic()))
    cancelled = embedder.submit_request(request([9]))
    cancelled.cancel()
    good = embedder.submit_request(request([10]))
    executor.gate.set()
    good.result(TIMEOUT_S)
    with pytest.raises(DeadlineError):
        late.result(TIMEOUT_S)
    assert [ids for plan in executor.plans for ids in plan.token_ids] == [[1], [10]]
    assert embedder.stats().scheduler.num_queued_requests == 0
    assert embedder.stats().scheduler.num_queued_tokens == 0


def test_texts_beyond_the_queue_limit_are_rejected(opened: Callable[..., Embedder]) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor, max_queued_requests=2, max_queued_tokens=5)
    held(embedder, executor)
    embedder.submit_request(request([1, 1]))
    with pytest.raises(OverloadedError, match="would exceed the limit of 5"):
        embedder.submit_request(request([1] * 4))
    embedder.submit_request(request([1, 1]))
    with pytest.raises(OverloadedError, match="The queue is full: at most 2 requests may wait"):
        embedder.check_room("", 0)


def test_the_end_of_the_engine_ends_waiting_texts(opened: Callable[..., Embedder]) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    waiting = embedder.submit_request(request([1]))
    stopping = threading.Thread(target=embedder.stop_steps)
    stopping.start()
    wait_for(lambda: not embedder.is_healthy)
    executor.gate.set()
    stopping.join(TIMEOUT_S)
    with pytest.raises(ShuttingDownError):
        waiting.result(TIMEOUT_S)
    with pytest.raises(EngineError):
        embedder.submit_request(request([1]))


def test_requests_end_although_a_thread_holds_the_lock_for_ever(
    opened: Callable[..., Embedder],
) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    waiting = embedder.submit_request(request([1, 2]))
    with embedder._lock:
        ending = threading.Thread(target=embedder._fail, args=(EngineError("It hangs."),))
        ending.start()
        assert isinstance(waiting.exception(TIMEOUT_S), EngineError)
        ending.join()


def test_a_step_that_ends_after_the_engine_has_failed_is_no_other_error(
    opened: Callable[..., Embedder], caplog: pytest.LogCaptureFixture
) -> None:
    executor = CountingExecutor(is_open=False)
    embedder = opened(executor)
    held(embedder, executor)
    embedder._fail(EngineError("It hangs."))
    executor.gate.set()
    wait_until(lambda: not embedder.stats().scheduler.num_running)
    embedder.stop_steps()
    assert caplog.records == []
