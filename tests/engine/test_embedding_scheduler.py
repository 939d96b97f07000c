"""Models that embed: batches, deaths of ranks, deadlines and full queues."""

from __future__ import annotations

import threading
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.engine.crash_search import DeathBudget
from cluster.engine.embedding_scheduler import EmbeddingRequest
from cluster.engine.engine_loop import EngineLoop
from pagedray.batch import StepOutput, StepPlan, TextBatch
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
from tests.fakes import FakeExecutor, RecordingSink, wait_for

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
        self.plans: list[StepPlan] = []
        self.gate = threading.Event()
        if is_open:
            self.gate.set()
        self._num_failures = num_failures

    @property
    def batches(self) -> list[TextBatch]:
        """The texts of each plan."""
        return [plan.texts for plan in self.plans if plan.texts is not None]

    def submit_plan(self, plan: StepPlan) -> None:
        super().submit_plan(plan)
        self.plans.append(plan)

    def collect_output(self) -> StepOutput:
        assert self.gate.wait(TIMEOUT_S)
        if self._num_failures:
            self._num_failures -= 1
            raise WorkerError("A rank died.")
        numbers = [number for ids in self.batches[-1].token_ids for number in (len(ids), ids[0])]
        output = super().collect_output()
        return StepOutput(output.step, [], vectors=array("f", numbers).tobytes())


@pytest.fixture
def opened() -> Iterator[Callable[..., EngineLoop]]:
    """Return a function that opens an engine, which is closed after the test."""
    engines: list[tuple[EngineLoop, CountingExecutor]] = []

    def open_one(executor: CountingExecutor, **limits: int) -> EngineLoop:
        config = EngineConfig(model=MODEL, scheduler=SchedulerConfig(**limits))  # type: ignore[arg-type]  # the stubs are narrower than the library
        budget = DeathBudget(barren_s=0.0, first_pause_s=0.001, max_pause_s=0.001)
        engine = EngineLoop(config, executor, RecordingSink(), death_budget=budget)
        engine.start_steps()
        engines.append((engine, executor))
        return engine

    yield open_one
    for engine, executor in engines:
        executor.gate.set()
        engine.stop_steps()


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
    return [[len(ids) for ids in batch.token_ids] for batch in executor.batches]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def held(engine: EngineLoop, executor: CountingExecutor) -> None:
    """Start a step that does not end before the gate opens."""
    engine.submit_texts(request([1]))
    wait_until(lambda: len(executor.plans) == 1)


def test_steps_hold_what_the_token_budget_allows_and_vectors_keep_their_order(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = CountingExecutor()
    texts = [[first] * length for first, length in enumerate((3, 12, 1, 4, 3, 11))]
    engine = opened(executor, max_num_batched_tokens=11)
    vectors = engine.submit_texts(request(*texts)).result(TIMEOUT_S)
    assert vectors.tolist() == [[float(len(ids)), float(ids[0])] for ids in texts]
    assert lengths(executor) == [[1, 3, 3, 4], [11], [12]]
    assert [plan.step for plan in executor.plans] == [0, 1, 2]
    assert engine.stats().num_prompt_tokens == 34


def test_steps_hold_no_more_texts_than_rows(opened: Callable[..., EngineLoop]) -> None:
    executor = CountingExecutor()
    opened(executor, max_num_seqs=2).submit_texts(request(*[[1]] * 5)).result(TIMEOUT_S)
    assert [len(batch.token_ids) for batch in executor.batches] == [2, 2, 1]


def test_a_step_holds_texts_of_several_calls_that_pool_alike(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    first = engine.submit_texts(request([2, 2]))
    second = engine.submit_texts(request([4], [5, 5, 5]))
    other = engine.submit_texts(request([3], pooling="cls"))
    executor.gate.set()
    assert first.result(TIMEOUT_S).tolist() == [[2.0, 2.0]]
    assert other.result(TIMEOUT_S).tolist() == [[1.0, 3.0]]
    assert second.result(TIMEOUT_S).tolist() == [[1.0, 4.0], [3.0, 5.0]]
    assert lengths(executor) == [[1], [1, 2, 3], [1]]


def test_one_text_of_another_tenant_does_not_wait_for_a_flood(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor, max_num_batched_tokens=10)
    held(engine, executor)
    flood = [engine.submit_texts(request([6] * 10, tenant="many")) for _ in range(50)]
    one = engine.submit_texts(request([7] * 10, tenant="one"))
    executor.gate.set()
    assert one.result(TIMEOUT_S).tolist() == [[10.0, 7.0]]
    place = next(i for i, batch in enumerate(executor.batches) if batch.token_ids[0][0] == 7)
    assert place <= 2
    for answer in flood:
        answer.result(TIMEOUT_S)


def test_a_tenant_with_three_times_the_weight_has_three_times_as_many_tokens(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor, max_num_batched_tokens=10)
    held(engine, executor)
    answers = [
        engine.submit_texts(request([first] * 10, tenant=str(first), weight=weight))
        for first, weight in ((6, 1.0), (7, 3.0)) * 40
    ]
    executor.gate.set()
    for answer in answers:
        answer.result(TIMEOUT_S)
    tenants = [batch.token_ids[0][0] for batch in executor.batches[1:41]]
    assert 28 <= tenants.count(7) <= 32


def test_tenants_without_calls_are_forgotten(opened: Callable[..., EngineLoop]) -> None:
    engine = opened(CountingExecutor())
    for number in range(20):
        engine.submit_texts(request([1], tenant=f"tenant {number}")).result(TIMEOUT_S)
    # A tenant is remembered only until others were served as much.
    assert len(engine._scheduler._table.waiting._shares) <= 1


def test_only_cut_vectors_that_were_normalized_are_again(opened: Callable[..., EngineLoop]) -> None:
    engine = opened(CountingExecutor())
    vectors = engine.submit_texts(request([7, 7], size=1, is_normalized=True)).result(TIMEOUT_S)
    assert vectors.tolist() == [[1.0]]
    assert vectors.dtype == np.float32
    vectors = engine.submit_texts(request([7, 7], size=1)).result(TIMEOUT_S)
    assert vectors.tolist() == [[2.0]]


def test_texts_go_to_new_ranks_when_the_old_ones_die(opened: Callable[..., EngineLoop]) -> None:
    executor = CountingExecutor(num_failures=1)
    answer = opened(executor).submit_texts(request([7, 7]))
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

    def collect_output(self) -> StepOutput:
        output = super().collect_output()
        texts = self.batches[-1].token_ids
        is_lethal = output.step >= self.step and any(LETHAL in ids for ids in texts)
        if self.dies_always or is_lethal:
            self.num_deaths += 1
            raise WorkerError("A rank died.")
        return output


@pytest.mark.parametrize("poisons", [{0}, {5}, {15}, {3, 4, 12}])
def test_texts_that_kill_their_ranks_fail_alone(
    opened: Callable[..., EngineLoop], poisons: set[int]
) -> None:
    executor = PoisonedExecutor()
    engine = opened(executor)
    held(engine, executor)
    answers = [
        engine.submit_texts(request([7], [LETHAL if index in poisons else 8, 9]))
        for index in range(16)
    ]
    executor.gate.set()
    failed = {i for i, answer in enumerate(answers) if answer.exception(TIMEOUT_S) is not None}
    assert failed == poisons
    assert all(isinstance(answers[i].exception(), LethalRequestError) for i in failed)
    assert answers[1].result().tolist() == [[1.0, 7.0], [2.0, 8.0]]
    assert executor.num_deaths <= len(poisons) * (3 + 4)
    assert engine.stats().num_lethal_requests == len(poisons)
    assert engine.stats().scheduler.num_queued_requests == 0


@pytest.mark.parametrize("step", range(1, 6))
def test_texts_that_kill_some_steps_after_each_start_fail_alone(
    opened: Callable[..., EngineLoop], step: int
) -> None:
    executor = PoisonedExecutor(step=step)
    engine = opened(executor, max_num_seqs=4)
    held(engine, executor)
    innocent = [engine.submit_texts(request(*[[7]] * 30)) for _ in range(3)]
    lethal = engine.submit_texts(request(*[[LETHAL]] * 200))
    executor.gate.set()
    assert isinstance(lethal.exception(TIMEOUT_S), LethalRequestError)
    assert all(answer.exception(TIMEOUT_S) is None for answer in innocent)
    assert executor.num_deaths <= 4 + 2


def test_a_lethal_request_that_is_alone_fails_after_three_deaths(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = PoisonedExecutor()
    executor.gate.set()
    engine = opened(executor)
    with pytest.raises(LethalRequestError):
        engine.submit_texts(request([LETHAL])).result(TIMEOUT_S)
    # Its texts are rejected when they come again.
    with pytest.raises(LethalRequestError):
        engine.submit_texts(request([LETHAL]))
    assert executor.num_deaths == 3
    assert engine.submit_texts(request([7])).result(TIMEOUT_S).tolist() == [[1.0, 7.0]]
    assert engine.is_healthy


def test_deaths_without_a_step_between_end_the_engine(opened: Callable[..., EngineLoop]) -> None:
    executor = PoisonedExecutor(dies_always=True)
    engine = opened(executor)
    answers = [engine.submit_texts(request([7])) for _ in range(3)]
    executor.gate.set()
    errors = [answer.exception(TIMEOUT_S) for answer in answers]
    assert all(isinstance(error, EngineError) for error in errors)
    assert "without finishing a step" in str(errors[-1])
    with pytest.raises(EngineError, match="has stopped"):
        engine.submit_texts(request([7]))
    assert not engine.is_healthy


def test_stopping_waits_for_the_running_step(opened: Callable[..., EngineLoop]) -> None:
    # Afterwards, its ranks end.
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    threading.Timer(0.05, executor.gate.set).start()
    engine.stop_steps(timeout_s=TIMEOUT_S)
    assert not engine._thread.is_alive()


def test_late_and_cancelled_texts_never_run(opened: Callable[..., EngineLoop]) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    late = engine.submit_texts(request([8], deadline_s=time.monotonic()))
    cancelled = engine.submit_texts(request([9]))
    cancelled.cancel()
    good = engine.submit_texts(request([10]))
    executor.gate.set()
    good.result(TIMEOUT_S)
    with pytest.raises(DeadlineError):
        late.result(TIMEOUT_S)
    assert [ids for batch in executor.batches for ids in batch.token_ids] == [[1], [10]]
    assert engine.stats().scheduler.num_queued_requests == 0
    assert engine.stats().scheduler.num_queued_tokens == 0


def test_texts_beyond_the_queue_limit_are_rejected(opened: Callable[..., EngineLoop]) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor, max_queued_requests=2, max_queued_tokens=5)
    held(engine, executor)
    engine.submit_texts(request([1, 1]))
    with pytest.raises(OverloadedError, match="would exceed the limit of 5"):
        engine.submit_texts(request([1] * 4))
    engine.submit_texts(request([1, 1]))
    with pytest.raises(OverloadedError, match="The queue is full: at most 2 requests may wait"):
        engine.check_room("", 0)


def test_the_end_of_the_engine_ends_waiting_texts(opened: Callable[..., EngineLoop]) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    waiting = engine.submit_texts(request([1]))
    stopping = threading.Thread(target=engine.stop_steps)
    stopping.start()
    wait_for(lambda: not engine.is_healthy)
    executor.gate.set()
    stopping.join(TIMEOUT_S)
    with pytest.raises(ShuttingDownError):
        waiting.result(TIMEOUT_S)
    with pytest.raises(EngineError):
        engine.submit_texts(request([1]))


def test_requests_end_although_a_thread_holds_the_lock_for_ever(
    opened: Callable[..., EngineLoop],
) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    waiting = engine.submit_texts(request([1, 2]))
    with engine._lock:
        ending = threading.Thread(target=engine._fail, args=(EngineError("It hangs."),))
        ending.start()
        assert isinstance(waiting.exception(TIMEOUT_S), EngineError)
        ending.join()


def test_a_step_that_ends_after_the_engine_has_failed_is_no_other_error(
    opened: Callable[..., EngineLoop], caplog: pytest.LogCaptureFixture
) -> None:
    executor = CountingExecutor(is_open=False)
    engine = opened(executor)
    held(engine, executor)
    engine._fail(EngineError("It hangs."))
    executor.gate.set()
    wait_until(lambda: not engine.stats().scheduler.num_running)
    engine.stop_steps()
    assert caplog.records == []
