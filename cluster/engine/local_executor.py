"""One rank inside the calling process, for debugging and for small models."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING

from cluster.engine.executor import Executor
from pagedray.batch import EmbedOutput, EmbedPlan, StepOutput
from pagedray.errors import StartupError, WorkerError

if TYPE_CHECKING:
    from cluster.engine.executor import ReportProgress
    from pagedray.batch import StepMasks, StepPlan
    from pagedray.config import CacheSize, EngineConfig
    from workers.worker import PendingStep, Worker

__all__ = ["LocalExecutor"]


class LocalExecutor(Executor):
    """One rank in this process, in a thread of its own."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._config = config
        self._report_progress = report_progress
        # All of a rank's work is done in one thread: each thread that computes has a team of
        # OpenMP threads, and with two teams there are more than cores and none may spin.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._running: deque[Future[PendingStep]] = deque()
        self._masks: SimpleQueue[StepMasks | None] = SimpleQueue()
        self._acknowledged_step = -1
        self._is_given_up = False
        try:
            started = self._thread.submit(self._started).result()
        except BaseException:
            # Ctrl-C ends the wait, not the thread: that ends with the tensor it is at.
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
        # Read here, that the rank's thread may launch the next step while the device runs this one.
        output = self._running.popleft().result().output()
        assert isinstance(output, StepOutput)
        self._acknowledged_step = output.step
        return output

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        output = self._thread.submit(lambda: self._worker.launch(plan).output()).result()
        assert isinstance(output, EmbedOutput)
        return output

    def restart_ranks(self) -> None:
        raise WorkerError("A rank inside the serving process cannot be replaced.")

    def close(self) -> None:
        # A step may wait for masks that nobody will send.
        self._masks.put(None)
        self._thread.shutdown(cancel_futures=True)
        self._worker.close()

    def _started(self) -> tuple[Worker, CacheSize, dict[str, dict[str, int]]]:
        # Torch is loaded only where a rank lives.
        from workers.parallel.group import SoloGroup
        from workers.worker_factory import make_worker

        worker = make_worker(self._config, SoloGroup())
        worker.load_weights(self._report_loading)
        cache_size = worker.available_cache()
        providers = worker.allocate_cache(cache_size.num_blocks, cache_size.num_cpu_blocks)
        return worker, cache_size, providers

    def _report_loading(self, done: int, total: int) -> None:
        if self._is_given_up:
            raise StartupError("Nobody waits for the model any more.")
        self._report_progress("Loading weights", done / max(total, 1))

    def _run(self, plan: StepPlan) -> PendingStep:
        pending = self._worker.launch(plan)
        if pending.needs_masks:
            masks = self._masks.get()
            if masks is None:
                raise WorkerError("The rank was closed.")
            pending.take_masks(masks)
        return pending
