"""A single rank inside the calling process, for debugging and small models."""

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
        output = self._running.popleft().result().output()
        assert isinstance(output, StepOutput)
        self._acknowledged_step = output.step
        return output

    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        output = self._thread.submit(lambda: self._worker.launch(plan).output()).result()
        assert isinstance(output, EmbedOutput)
        return output

    def restart_ranks(self) -> None:
        raise WorkerError("The local executor cannot restart its rank.")

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
