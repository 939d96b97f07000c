"""The local executor: acknowledged steps, and an interrupt while loading."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING

import pytest

from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.local_executor import LocalExecutor
from pagedray.batch import BlockCopy, SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.errors import WorkerError
from pagedray.sampling_params import SamplingParams
from tests.system.server_process import TINY_LLAMA
from tests.workers.copying_steps import CopyingWorker
from workers.decoder_worker import DecoderWorker

if TYPE_CHECKING:
    from cluster.engine.executor import RankHealth
    from pagedray.config import EngineConfig


def config() -> EngineConfig:
    return engine_config(
        TINY_LLAMA,
        EngineOptions(
            executor="local", device="cpu", num_threads=1, num_blocks=16, num_cpu_blocks=8
        ),
    )


def test_step_reports_the_times_of_its_swaps_and_its_forward_pass() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    start = SequenceStart(
        0, pack_token_ids([5, 6, 7]), 3, [1], SamplingParams(temperature=0.0), 0, 0
    )
    executor.submit_plan(StepPlan(0, [SequencePlan(0, 0, 3, True)], [start]))
    prefill = executor.collect_output()
    # An output has the time of all copies that have ended before it is taken.
    executor.submit_plan(StepPlan(1, [], swap_outs=[BlockCopy(1, 2)]))
    swap = executor.collect_output()
    executor.close()
    assert prefill.forward_s > 0.0
    assert prefill.swap_s == 0.0
    assert swap.swap_s > 0.0


def test_step_reports_how_long_the_rank_had_nothing_to_compute() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    start = SequenceStart(0, pack_token_ids([5, 6, 7]), 3, [1], SamplingParams(), 0, 0)
    executor.submit_plan(StepPlan(0, [SequencePlan(0, 0, 3, True)], [start]))
    first = executor.collect_output()
    time.sleep(0.05)
    for step in (1, 2):
        executor.submit_plan(StepPlan(step, [SequencePlan(0, 2 + step, 1, True)]))
    late, ahead = executor.collect_output(), executor.collect_output()
    executor.close()
    assert first.idle_s == 0.0
    assert late.idle_s >= 0.05
    assert 0.0 <= ahead.idle_s < late.idle_s


def test_steps_are_acknowledged_in_order_once_their_copies_have_ended() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    executor._worker.close()
    worker = CopyingWorker()
    executor._worker = worker  # type: ignore[assignment]  # it does what is needed here
    for step in range(3):
        executor.submit_plan(StepPlan(step, []))
        assert not executor.collect_output().is_acknowledged
    assert executor.poll_ranks()[0] == -1
    worker.steps[0].is_copied = True
    assert executor.poll_ranks()[0] == 0
    worker.steps[2].is_copied = True
    assert executor.poll_ranks()[0] == 0
    worker.steps[1].is_copied = True
    assert executor.poll_ranks()[0] == 2
    executor.close()


def test_a_rank_whose_copies_do_not_end_hangs_although_its_step_has_ended() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    executor._worker.close()
    worker = CopyingWorker()
    executor._worker = worker  # type: ignore[assignment]  # it does what is needed here
    executor.submit_plan(StepPlan(0, []))
    executor.collect_output()

    def health_after(seconds: float) -> RankHealth:
        for _ in range(int(seconds / 0.25)):
            health = executor.observe_ranks(next(times))
            if health.hang:
                break
        return health

    times = count(1000.0, 0.25)
    assert health_after(29.0).hang == ""
    assert health_after(1.0).is_busy
    expected = "s (rank 0: waiting for its device, the block copies of step 0 under way)."
    assert health_after(2.0).hang.endswith(expected)
    worker.end_copies()
    assert executor.poll_ranks()[0] == 0
    health = health_after(60.0)
    assert (health.hang, health.is_busy) == ("", False)
    executor.close()


def test_failed_rank_gets_a_new_cache_and_keeps_its_model() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    worker = executor._worker
    assert isinstance(worker, DecoderWorker)
    model, old_runner = worker._model, weakref.ref(worker._runner)
    start = SequenceStart(
        0, pack_token_ids([5, 6, 7]), 3, [1], SamplingParams(temperature=0.0), 0, 0
    )
    good = StepPlan(0, [SequencePlan(0, 0, 3, True)], [start])
    executor.submit_plan(good)
    expected = executor.collect_output().token_ids
    bad = SequenceStart(1, pack_token_ids([10**6]), 1, [2], SamplingParams(), 0, 0)
    executor.submit_plan(StepPlan(1, [SequencePlan(1, 0, 1, True)], [bad]))
    executor.submit_plan(StepPlan(2, [SequencePlan(1, 1, 1, True)]))
    with pytest.raises(WorkerError, match=r"Rank 0 failed: IndexError: ") as caught:
        executor.collect_output()
    assert "Traceback" in caught.value.details
    # The CPU pool stays as it was.
    assert executor.restart_ranks()
    assert worker._model is model
    assert old_runner() is None
    assert executor.poll_ranks()[0] == -1
    executor.submit_plan(good)
    assert executor.collect_output().token_ids == expected
    executor.close()


def test_rank_that_waits_for_masks_can_be_restarted() -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    masked = SequenceStart(0, pack_token_ids([5]), 1, [1], SamplingParams(), 0, 0, (), True)
    for step in range(2):
        executor.submit_plan(StepPlan(step, [SequencePlan(0, 0, 1, True)], [masked]))
    executor.restart_ranks()
    start = SequenceStart(0, pack_token_ids([5]), 1, [1], SamplingParams(), 0, 0)
    executor.submit_plan(StepPlan(0, [SequencePlan(0, 0, 1, True)], [start]))
    assert len(executor.collect_output().token_ids) == 1
    executor.close()


def test_loading_ends_soon_after_it_is_interrupted() -> None:
    reported: list[str] = []

    def report(what: str, fraction: float) -> None:
        reported.append(what)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalExecutor(config(), report)
    assert len(reported) == 1


class IdleWorker(CopyingWorker):
    """A worker that has something to do in idle time, a few times."""

    def __init__(self, executor: LocalExecutor, num_times: int) -> None:
        super().__init__()
        self._executor = executor
        self._num_left = num_times
        self.were_running: list[bool] = []
        self.has_ended = threading.Event()

    def use_idle_time(self) -> bool:
        self.were_running.append(bool(self._executor._running))
        self._num_left -= 1
        if self._num_left == 0:
            self.has_ended.set()
            raise RuntimeError("a defect")
        return True


def test_worker_prepares_for_steps_while_none_runs(caplog: pytest.LogCaptureFixture) -> None:
    executor = LocalExecutor(config(), lambda what, fraction: None)
    executor._worker.close()
    executor._running.append(Future())
    executor._worker = worker = IdleWorker(executor, num_times=3)  # type: ignore[assignment]  # as above
    executor._thread.use_idle_time(executor._use_idle_time)
    assert not worker.has_ended.wait(0.3)
    executor._running.clear()
    assert worker.has_ended.wait(60.0)
    assert worker.were_running == [False] * 3
    # A failure does not end the thread.
    executor.submit_plan(StepPlan(0, []))
    executor.collect_output()
    executor.close()
    assert "Preparing for steps in idle time failed." in caplog.text
