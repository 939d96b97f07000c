"""An engine that makes no progress is not healthy, and ends if what hangs cannot be replaced.

Time is simulated: the watchdog's check is called with the times at which it would have run.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cluster.engine import rank_monitor
from cluster.engine.engine_loop import EngineLoop
from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.executor import RankHealth
from cluster.engine.local_executor import LocalExecutor
from cluster.engine.rank_monitor import WatchLimits
from cluster.engine.watchdog import ProgressClock
from pagedray.errors import EngineError, HungRankError, WorkerError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.engine.controller_rig import Rig
from tests.fakes import FakeExecutor, RecordingSink, wait_for
from tests.system.server_process import ROOT, TINY_LLAMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

    from pagedray.batch import StepPlan
    from pagedray.config import EngineConfig
    from workers.worker import PendingStep, Worker

TICK_S = 0.25
NOTICED_S = 10.0


class Checks:
    """Calls a controller's check as its watchdog would."""

    def __init__(self, controller: EngineLoop) -> None:
        controller._watchdog.stop()
        # A check may be running.
        controller._watchdog._thread.join()
        self._controller = controller
        self._now_s = time.monotonic()

    def seconds_until(self, is_true: Callable[[], bool], limit_s: float) -> float:
        """Check until something holds; return for how long, in simulated time."""
        elapsed_s = 0.0
        while not is_true():
            assert elapsed_s < limit_s
            elapsed_s += TICK_S
            self._controller._check_progress(self._now_s + elapsed_s)
        self._now_s += elapsed_s
        return elapsed_s

    def run_for(self, seconds: float) -> None:
        """Check for some simulated time."""
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self._now_s += TICK_S
            self._controller._check_progress(self._now_s)


class StuckWorker:
    """A worker whose launches do not return until it is released."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.is_stuck = threading.Event()
        self.may_continue = threading.Event()

    def launch(self, plan: StepPlan) -> PendingStep:
        self.is_stuck.set()
        self.may_continue.wait()
        return self._worker.launch(plan)

    def close(self) -> None:
        self._worker.close()


class BrokenWorker:
    """A worker whose steps fail, and whose cache cannot be dropped until it is released."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.may_continue = threading.Event()

    def launch(self, plan: StepPlan) -> PendingStep:
        raise RuntimeError("a defect")

    def end_epoch(self) -> None:
        self.may_continue.wait()
        raise RuntimeError("another defect")

    def close(self) -> None:
        self._worker.close()


def request(request_id: str) -> Request:
    return Request(
        id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=5, ignore_eos=True),
        seed=0,
    )


class LosesOutputs(FakeExecutor):
    """Ranks that have finished every plan, but whose outputs do not arrive."""

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth()


class StartsLong(LosesOutputs):
    """Ranks that start again only when they may."""

    def __init__(self) -> None:
        super().__init__()
        self.is_starting, self.may_start = threading.Event(), threading.Event()

    def restart_ranks(self) -> bool:
        keeps_cpu_pool = super().restart_ranks()
        self.is_starting.set()
        self.may_start.wait()
        return keeps_cpu_pool


class ComputesLong(FakeExecutor):
    """Ranks whose step takes long, and which show progress meanwhile."""

    def observe_ranks(self, now_s: float) -> RankHealth:
        return RankHealth(is_busy=True)


@contextmanager
def running(executor: FakeExecutor) -> Iterator[tuple[Rig, Checks]]:
    """A controller whose steps run until the block ends, and its checks."""
    rig = Rig(executor)
    rig.controller.start_steps()
    yield rig, Checks(rig.controller)
    executor.may_step.set()
    rig.controller.stop_steps()


def test_work_without_steps_is_noticed_and_ends_the_engine() -> None:
    executor = LosesOutputs()
    with running(executor) as (rig, checks):
        controller = rig.controller
        checks.run_for(100.0)
        assert controller.is_healthy

        executor.may_step.clear()
        rig.submit("a")
        assert checks.seconds_until(lambda: not controller.is_healthy, NOTICED_S) >= 8.0
        assert controller.stats().num_hangs == {"rank": 0, "steps": 1}
        assert controller.error is None

        checks.seconds_until(lambda: controller.error is not None, 70.0)
        assert isinstance(rig.ends()["a", 0], EngineError)
        # It is one hang, however often it is seen.
        assert controller.stats().num_hangs == {"rank": 0, "steps": 1}


def test_a_long_step_of_ranks_that_make_progress_is_no_hang() -> None:
    executor = ComputesLong()
    with running(executor) as (rig, checks):
        executor.may_step.clear()
        rig.submit("a")
        checks.run_for(200.0)
        assert rig.controller.is_healthy
        executor.may_step.set()
        assert rig.ends() == {("a", 0): FinishReason.LENGTH}
        assert rig.controller.stats().num_hangs == {"rank": 0, "steps": 0}


def test_a_long_replacement_of_ranks_is_no_hang() -> None:
    executor = StartsLong()
    with running(executor) as (rig, checks):
        executor.step_failures.append(WorkerError("Rank 0 died."))
        rig.submit("a")
        assert executor.is_starting.wait(60.0)
        checks.run_for(200.0)
        assert rig.controller.error is None
        executor.may_start.set()
        assert rig.ends() == {("a", 0): FinishReason.LENGTH}
        assert rig.controller.stats().num_hangs == {"rank": 0, "steps": 0}


def test_step_thread_that_continues_is_healthy_again() -> None:
    executor = LosesOutputs()
    with running(executor) as (rig, checks):
        executor.may_step.clear()
        rig.submit("a")
        checks.seconds_until(lambda: not rig.controller.is_healthy, NOTICED_S)
        executor.may_step.set()
        assert rig.ends() == {("a", 0): FinishReason.LENGTH}
        checks.run_for(1.0)
        assert rig.controller.is_healthy


def test_hung_ranks_are_replaced_and_counted() -> None:
    executor = FakeExecutor()
    executor.step_failures.append(HungRankError("Rank 0 hangs."))
    with running(executor) as (rig, _):
        rig.submit("a")
        assert rig.ends() == {("a", 0): FinishReason.LENGTH}
        assert rig.controller.stats().replacements == {"death": 0, "hang": 1}


def test_lock_that_is_held_for_ever_does_not_keep_the_engine_from_ending() -> None:
    executor = LosesOutputs()
    with running(executor) as (rig, checks):
        controller = rig.controller
        executor.may_step.clear()
        rig.submit("a")
        with controller._lock:
            checker = threading.Thread(
                target=checks.seconds_until, args=(lambda: controller.error is not None, 80.0)
            )
            checker.start()
            checker.join(60.0)
            assert controller.error is not None
            assert rig.sink.ends["a", 0] == [controller.error]


def local_executor() -> tuple[EngineConfig, LocalExecutor]:
    """Return an executor with a rank in this process, and its configuration."""
    options = EngineOptions(
        executor="local", device="cpu", num_threads=1, num_blocks=16, num_cpu_blocks=8
    )
    settings = engine_config(TINY_LLAMA, options)
    return settings, LocalExecutor(settings, lambda what, fraction: None)


def test_local_rank_that_hangs_is_noticed_and_ends_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings, executor = local_executor()
    sink = RecordingSink()
    controller = EngineLoop(settings, executor, sink)
    controller.start_steps()
    checks = Checks(controller)
    # The kinds of steps become known.
    sink.expect("a")
    controller.submit_request(request("a"))
    wait_for(lambda: not (sink.num_open or controller._has_work))
    checks.run_for(100.0)
    assert controller.is_healthy

    stuck = StuckWorker(executor._worker)
    executor._worker = stuck  # type: ignore[assignment]  # the executor only launches and closes
    sink.expect("b")
    controller.submit_request(request("b"))
    assert stuck.is_stuck.wait(60.0)
    assert checks.seconds_until(lambda: not controller.is_healthy, NOTICED_S) >= 6.0
    assert "Rank 0 has made no progress" in caplog.text
    assert controller.stats().num_hangs == {"rank": 1, "steps": 0}
    checks.seconds_until(lambda: controller.error is not None, 70.0)
    wait_for(lambda: not sink.num_open)
    assert isinstance(sink.ends["b", 0][0], EngineError)
    stuck.may_continue.set()
    controller.close()


def test_time_that_was_not_observed_does_not_count() -> None:
    clock, now_s = ProgressClock(), 0.0
    for _ in range(10):
        now_s += 3600.0
        silence_s = clock.silence_s(now_s, 7, is_expected=False)
    assert silence_s <= 5.0


def test_local_rank_that_hangs_while_it_starts_again_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings, executor = local_executor()
    # After the first start, which may take long.
    monkeypatch.setattr(rank_monitor, "_START_LIMITS", WatchLimits(first_s=0.5))
    sink = RecordingSink()
    executor._worker = broken = BrokenWorker(executor._worker)  # type: ignore[assignment]  # see above
    controller = EngineLoop(settings, executor, sink)
    controller.start_steps()
    sink.expect("a")
    controller.submit_request(request("a"))
    try:
        wait_for(lambda: not sink.num_open)
    finally:
        broken.may_continue.set()
    assert isinstance(sink.ends["a", 0][0], EngineError)
    assert "Rank 0 has made no progress" in str(controller.error)
    controller.close()


def test_process_ends_although_its_rank_hangs() -> None:
    program = (
        "import threading; from cluster.engine.local_executor import RankThread; "
        "thread, begun = RankThread(), threading.Event(); "
        "thread.submit(lambda: begun.set() or threading.Event().wait()); "
        "raise SystemExit(not begun.wait(30.0) or thread.close(0.1))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0
