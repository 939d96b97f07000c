"""A single rank inside the calling process, for debugging and small models.

An exception in a step ends neither the process nor the model: the rank gets new rows and a new
cache. What ends the process, such as a segmentation fault, ends the engine with it.
"""

from __future__ import annotations

import traceback
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from cluster.engine.executor import Executor
from pagedray.batch import EmbedOutput, EmbedPlan, StepOutput
from pagedray.errors import PagedRayError, StartupError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.engine.executor import ReportProgress
    from pagedray.batch import StepMasks, StepPlan
    from pagedray.config import CacheSize, EngineConfig
    from workers.worker import PendingStep, Worker

__all__ = ["LocalExecutor"]

Result = TypeVar("Result")


class LocalExecutor(Executor):
    """One rank in a thread of this process."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._config = config
        self._report_progress = report_progress
        # One thread does all the computing: each thread that computes has an OpenMP team of its
        # own, and two teams would be more threads than cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._running: deque[Future[PendingStep]] = deque()
        self._masks: SimpleQueue[StepMasks | None] = SimpleQueue()
        self._acknowledged_step = -1
        self._is_given_up = False
        try:
            started = self._thread.submit(self._started).result()
        except BaseException:
            # Ctrl-C ends the wait; the thread ends after the current tensor.
            self._is_given_up = True
            self._thread.shutdown()
            raise
        self._worker, self._cache_size, self._attention_providers = started

    @property
    def cache_size(self) -> CacheSize:
        return self._cache_size

    @property
    def attention_providers(self) -> dict[str, dict[str, int]]:
        return self._attention_providers

    @property
    def acknowledged_step(self) -> int:
        return self._acknowledged_step

    def submit_plan(self, plan: StepPlan) -> None:
        self._running.append(self._thread.submit(self._run, plan))

    def send_masks(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def collect_output(self) -> StepOutput:
        # Waited for here, so that the rank's thread can launch the next step meanwhile.
        running = self._running.popleft()
        output = _survived(lambda: running.result().output())
        assert isinstance(output, StepOutput)
        self._acknowledged_step = output.step
        return output

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        running = self._thread.submit(self._worker.launch, plan)
        output = _survived(lambda: running.result().output())
        assert isinstance(output, EmbedOutput)
        return output

    def restart_ranks(self) -> None:
        """Give the rank new rows and a new cache; the model stays loaded."""
        for step in self._running:
            step.cancel()
        # A step may be waiting for masks.
        self._masks.put(None)
        wait(self._running)
        self._running.clear()
        self._masks = SimpleQueue()
        self._acknowledged_step = -1
        _survived(self._thread.submit(self._begin_epoch).result)

    def close(self) -> None:
        # Release a step that is waiting for masks.
        self._masks.put(None)
        self._thread.shutdown(cancel_futures=True)
        self._worker.close()

    def _started(self) -> tuple[Worker, CacheSize, dict[str, dict[str, int]]]:
        # torch is imported only in the process of a rank.
        from workers.parallel.group import SoloGroup
        from workers.worker_factory import make_worker

        worker = make_worker(self._config, SoloGroup())
        worker.load_weights(self._report_loading)
        cache_size = worker.available_cache()
        providers = worker.allocate_cache(cache_size.num_blocks, cache_size.num_cpu_blocks)
        worker.warm_up()
        worker.capture_graphs()
        return worker, cache_size, providers

    def _begin_epoch(self) -> None:
        try:
            self._worker.end_epoch()
        except RuntimeError as error:
            # Only a new process could use it again.
            raise StartupError(f"The device of this process has failed: {error}.") from error
        size = self._cache_size
        self._worker.allocate_cache(size.num_blocks, size.num_cpu_blocks)
        self._worker.warm_up()
        self._worker.capture_graphs(only_largest=True)

    def _report_loading(self, done: int, total: int) -> None:
        if self._is_given_up:
            raise StartupError("Loading was interrupted.")
        self._report_progress("Loading weights", done / max(total, 1))

    def _run(self, plan: StepPlan) -> PendingStep:
        pending = self._worker.launch(plan)
        if pending.needs_masks:
            masks = self._masks.get()
            if masks is None:
                raise WorkerError("The rank was closed.")
            pending.take_masks(masks)
        return pending


def _survived(compute: Callable[[], Result]) -> Result:
    """Return the result of what a rank computes. Raises WorkerError for most exceptions."""
    try:
        return compute()
    except PagedRayError:
        raise
    except Exception as error:
        lines = traceback.format_exception(error)
        # They hold the cache, for which the next one needs the memory.
        traceback.clear_frames(error.__traceback__)
    raise WorkerError(f"Rank 0 failed: {lines[-1].strip()}.", details="".join(lines).strip())
