"""A single rank inside the calling process, for debugging and small models.

An exception in a step ends neither the process nor the model: the rank gets new rows and a new
cache. A fault that ends the process, such as a segmentation fault, ends the engine too.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.engine.executor import Executor, RankHealth
from cluster.engine.rank_monitor import RankMonitor, StartLimit
from pagedray.errors import HungRankError, PagedRayError, StartupError, WorkerError
from pagedray.machine import let_others_interrupt
from pagedray.rank_progress import MAX_INDEX, Phase, ProgressWord, RankReport
from workers.hub.locate import DownloadLine

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.engine.executor import ReportProgress
    from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
    from pagedray.config import CacheSize, EngineConfig, KernelReport
    from pagedray.rank_roofline import RankRoofline
    from workers.decoder_worker import DecoderWorker
    from workers.worker import PendingStep, Worker

    Started = tuple[Worker, CacheSize, KernelReport, DecoderWorker | None]

__all__ = ["LocalExecutor"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_CLOSE_TIMEOUT_S = 5.0
_POLL_S = 0.25

IDLE_S = 0.05
"""Time without a call after which idle time is used; shorter pauses are between steps."""


class LocalExecutor(Executor):
    """One rank in a thread of this process, which cannot be replaced if it hangs."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._config = config
        self._report_progress = report_progress
        self._download_line = DownloadLine(config.model.name)
        # One thread does all the computing: each thread that computes has an OpenMP team of its
        # own, and two teams would be more threads than cores.
        self._thread = RankThread()
        self._progress = ProgressWord()
        self._monitor = self._new_monitor()
        self._running: deque[Future[PendingStep]] = deque()
        self._masks: SimpleQueue[StepMasks | None] = SimpleQueue()
        self._acknowledged_step = -1
        self._copying: deque[tuple[int, PendingStep]] = deque()
        """Steps with collected output and running block copies."""
        self._is_given_up = False
        try:
            started = self._result(self._thread.submit(self._started))
        except BaseException:
            # Ctrl-C ends the wait; the thread ends after the current tensor.
            self._is_given_up = True
            self._thread.close(_CLOSE_TIMEOUT_S)
            raise
        self._worker, self._cache_size, self._kernels, self._decoder = started
        self._monitor.begin_steps()
        self._thread.use_idle_time(self._use_idle_time)

    def poll_ranks(self) -> tuple[int, list[DiskReport]]:
        while self._copying and self._are_first_copied():
            self._acknowledged_step = self._copying.popleft()[0]
            self._note_copies()
        reports: list[DiskReport] = []
        if self._decoder is not None and (disk := self._decoder.disk_jobs) is not None:
            while (report := disk.take_report()) is not None:
                reports.append(report)
        return self._acknowledged_step, reports

    def submit_plan(self, plan: StepPlan) -> None:
        self._monitor.note_message(plan)
        self._running.append(self._thread.submit(lambda: self._run(plan)))

    def send_masks(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def collect_output(self) -> StepOutput:
        # Waited for here, so that the rank's thread can launch the next step meanwhile.
        running = self._running.popleft()
        output = _survived(lambda: running.result().output())
        if output.is_acknowledged:
            self._copying.clear()
            self._acknowledged_step = output.step
        else:
            self._copying.append((output.step, running.result()))
        self._note_copies()
        self._progress.finish_step(output.step)
        return output

    def measure_rooflines(self) -> list[RankRoofline]:
        if self._decoder is None:
            return []
        return [self._thread.submit(self._decoder.measure_roofline).result()]

    def observe_ranks(self, now_s: float) -> RankHealth:
        return replace(self._monitor.observe(now_s), is_replaceable=False)

    def restart_ranks(self) -> bool:
        """Give the rank new rows and a new device pool; the model and the CPU pool stay."""
        for step in self._running:
            step.cancel()
        self._running.clear()
        self._copying.clear()
        self._acknowledged_step = -1
        self._progress.finish_step(-1)
        self._note_copies()
        self._monitor = self._new_monitor()
        # A step may be waiting for masks.
        self._masks.put(None)
        # Behind the step that runs, which may hang too.
        beginning = self._thread.submit(self._begin_epoch)
        _survived(lambda: self._result(beginning))
        self._monitor.begin_steps()
        return self._decoder is not None and self._decoder.pool_report.is_kept

    def close(self) -> None:
        # Release a step that is waiting for masks.
        self._masks.put(None)
        # They hold the CPU pool.
        self._copying.clear()
        if self._thread.close(_CLOSE_TIMEOUT_S):
            self._worker.close()

    def _started(self) -> Started:
        # torch is imported only in the process of a rank.
        from workers.decoder_worker import DecoderWorker
        from workers.embedding_worker import make_worker
        from workers.hub.locate import with_local_weights
        from workers.parallel.group import SoloGroup
        from workers.startup import import_modules

        if self._config.model.hub is not None:
            self._progress.enter(Phase.DOWNLOADING)
            self._config = with_local_weights(self._config, self._report_download)
            self._progress.enter(Phase.STARTING)
        if self._config.parallel.device == "cpu":
            let_others_interrupt(threading.get_native_id())
        # Kernels that are compiled for an actor are found here too.
        import_modules(self._config)
        worker = make_worker(self._config, SoloGroup(self._progress))
        worker.load_weights(self._report_loading)
        limits = self._config.scheduler.limits(worker.default_limits)
        cache_size = worker.available_cache(limits)
        kernels = worker.allocate_cache(cache_size.num_blocks, cache_size.num_cpu_blocks)
        worker.warm_up()
        worker.capture_graphs()
        decoder = worker if isinstance(worker, DecoderWorker) else None
        return worker, cache_size, kernels, decoder

    def _are_first_copied(self) -> bool:
        _, first = self._copying[0]
        return _survived(lambda: first.is_copied)

    def _note_copies(self) -> None:
        self._progress.await_copies(self._copying[0][0] if self._copying else None)

    def _new_monitor(self) -> RankMonitor:
        return RankMonitor(_OwnReports(self._progress), self._config.parallel.device, StartLimit())

    def _begin_epoch(self) -> None:
        self._progress.enter(Phase.PREPARING)
        self._masks = SimpleQueue()
        try:
            self._worker.end_epoch()
        except RuntimeError as error:
            # Only a new process could use it again.
            raise StartupError(f"The device of this process has failed: {error}.") from error
        size = self._cache_size
        self._worker.allocate_cache(size.num_blocks, size.num_cpu_blocks)
        self._worker.warm_up()
        self._worker.capture_graphs()

    def _use_idle_time(self) -> float | None:
        """Let the worker pin memory, which would delay steps.

        All graphs are captured before: during a capture, CUDA rejects some calls of other threads,
        such as the program's.
        """
        if self._running or self._copying:
            return IDLE_S
        try:
            has_more = self._worker.use_idle_time()
        except Exception:
            # The thread would end otherwise. A device that has failed fails the next step, too.
            logger.warning("Preparing for steps in idle time failed.", exc_info=True)
            return None
        self._progress.enter(Phase.IDLE)
        return 0.0 if has_more else None

    def _report_download(self, done: int, total: int) -> None:
        if self._is_given_up:
            raise StartupError("The download was interrupted.")
        self._report_progress(self._download_line.text(done), done / max(total, 1))

    def _report_loading(self, done: int, total: int) -> None:
        if self._is_given_up:
            raise StartupError("Loading was interrupted.")
        self._progress.enter(Phase.LOADING, min(done, MAX_INDEX))
        self._report_progress("Loading weights", done / max(total, 1))

    def _result(self, starting: Future[Result]) -> Result:
        """Return the result of a start. Raises StartupError if it makes no progress."""
        while True:
            try:
                return starting.result(_POLL_S)
            except TimeoutError:
                # One of the start itself is an error like others.
                if starting.done():
                    raise
            try:
                self._monitor.check_start()
            except HungRankError as error:
                raise StartupError(str(error)) from error

    def _run(self, plan: StepPlan) -> PendingStep:
        pending = self._worker.launch(plan)
        if pending.needs_masks:
            self._progress.enter(Phase.MASKS)
            masks = self._masks.get()
            if masks is None:
                raise WorkerError("The rank was closed.")
            pending.take_masks(masks)
        self._progress.enter(Phase.DEVICE)
        return pending


class _OwnReports:
    """The reports of a rank in this process, which runs whenever they are read."""

    def __init__(self, progress: ProgressWord) -> None:
        self._progress = progress

    def read(self) -> list[RankReport]:
        self._progress.beat(is_compiling=False)
        return [RankReport.from_cells(self._progress.cells())]

    def process_state(self, rank: int) -> str:
        return ""

    def is_stopped(self, rank: int) -> bool:
        return False


def _survived(compute: Callable[[], Result]) -> Result:
    """Return the result of a rank's computation. Raises WorkerError for most exceptions."""
    try:
        return compute()
    except PagedRayError:
        raise
    except Exception as error:
        lines = traceback.format_exception(error)
        # The frames hold the cache, and the next cache needs the memory.
        traceback.clear_frames(error.__traceback__)
    raise WorkerError(f"Rank 0 failed: {lines[-1].strip()}.", details="".join(lines).strip())


class RankThread:
    """Runs calls in order, in one thread.

    A process does not wait for it at its end, unlike for a `ThreadPoolExecutor`, so that a rank
    that hangs does not keep the server from exiting.
    """

    def __init__(self) -> None:
        # Any: calls of any result.
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._use_idle_time: Callable[[], float | None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="pagedray-rank", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call after earlier calls."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        return future

    def use_idle_time(self, call: Callable[[], float | None]) -> None:
        """Run `call` in the thread when no other call has arrived for `IDLE_S`.

        It returns the seconds after which it is to run again if no other call arrives, or None.
        """
        self.submit(lambda: setattr(self, "_use_idle_time", call))

    def close(self, timeout_s: float) -> bool:
        """Cancel the calls that have not begun; return whether the thread ended in time."""
        try:
            while (entry := self._calls.get_nowait()) is not None:
                entry[0].cancel()
        except Empty:
            pass
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # Any: as above.
    def _next_entry(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        wait_s: float | None = IDLE_S
        while True:
            try:
                return self._calls.get(timeout=wait_s)
            except Empty:
                wait_s = self._use_idle_time()

    def _run(self) -> None:
        while (entry := self._next_entry()) is not None:
            future, call = entry
            # The result would otherwise live until the next call.
            del entry
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # raised by `Future.result`
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del future, call
