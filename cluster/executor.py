"""The ranks as one thing: what the controller sends plans to.

`LocalExecutor` runs one rank inside this process, for debugging and fast tests; the ranks
of a cluster are `cluster.ray_executor`'s matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from pagedray.batch import EmbedOutput, EmbedPlan, StepOutput
from pagedray.errors import StartupError, WorkerError

if TYPE_CHECKING:
    from pagedray.batch import StepMasks, StepPlan
    from pagedray.config import EngineConfig
    from workers.worker_kinds import AnyWorker, Pending

__all__ = ["CacheSize", "Executor", "LocalExecutor", "ReportProgress", "make_executor"]

ReportProgress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Blocks of the two pools, equal on every rank."""

    num_blocks: int
    num_cpu_blocks: int


class Executor(ABC):
    """A group of ranks. Plans are carried out in the order they are submitted."""

    @property
    @abstractmethod
    def cache_size(self) -> CacheSize:
        """Blocks of the pools."""

    @property
    @abstractmethod
    def attention_servers(self) -> dict[str, dict[str, int]]:
        """How many layers whose attention kernels serve, by part of a step and server."""

    @property
    @abstractmethod
    def acknowledged_step(self) -> int:
        """The last step that every rank has finished, its block copies included."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Raises WorkerError."""

    @abstractmethod
    def send_masks(self, masks: StepMasks) -> None:
        """Send every rank the masks of the last plan, which it samples under. Raises WorkerError.

        The outputs of all plans before it have been collected.
        """

    @abstractmethod
    def collect(self) -> StepOutput:
        """Return the output of the oldest plan that has none yet. Raises WorkerError."""

    @abstractmethod
    def embed(self, plan: EmbedPlan) -> EmbedOutput:
        """Return what an encoder makes of texts; not beside other plans. Raises WorkerError."""

    @abstractmethod
    def restart(self) -> None:
        """Replace every rank by a new one that has no plan; steps count from 0 again.

        Raises WorkerError or StartupError.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks and release what they hold. May be called twice."""


class LocalExecutor(Executor):
    """One rank in this process, in a thread of its own."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        self._config = config
        self._report_progress = report_progress
        # All of a rank's work is done in one thread: each thread that computes has a team of
        # OpenMP threads, and with two teams there are more than cores and none may spin.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._running: deque[Future[Pending]] = deque()
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
        self._worker, self._cache_size, self._attention_servers = started

    @property
    def cache_size(self) -> CacheSize:
        return self._cache_size

    @property
    def attention_servers(self) -> dict[str, dict[str, int]]:
        return self._attention_servers

    @property
    def acknowledged_step(self) -> int:
        return self._acknowledged_step

    def submit(self, plan: StepPlan) -> None:
        self._running.append(self._thread.submit(self._run, plan))

    def send_masks(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def collect(self) -> StepOutput:
        # Read here, that the rank's thread may launch the next step while the device runs this one.
        output = self._running.popleft().result().output()
        assert isinstance(output, StepOutput)
        self._acknowledged_step = output.step
        return output

    def embed(self, plan: EmbedPlan) -> EmbedOutput:
        output = self._thread.submit(lambda: self._worker.launch(plan).output()).result()
        assert isinstance(output, EmbedOutput)
        return output

    def restart(self) -> None:
        raise WorkerError("A rank inside the serving process cannot be replaced.")

    def close(self) -> None:
        # A step may wait for masks that nobody will send.
        self._masks.put(None)
        self._thread.shutdown(cancel_futures=True)
        self._worker.close()

    def _started(self) -> tuple[AnyWorker, CacheSize, dict[str, dict[str, int]]]:
        # Torch is loaded only where a rank lives.
        from workers.parallel import SoloGroup
        from workers.worker_kinds import make_worker

        worker = make_worker(self._config, SoloGroup())
        worker.load(self._report_loading)
        cache_size = CacheSize(*worker.fitting_blocks())
        servers = worker.allocate_cache(cache_size.num_blocks, cache_size.num_cpu_blocks)
        return worker, cache_size, servers

    def _report_loading(self, done: int, total: int) -> None:
        if self._is_given_up:
            raise StartupError("Nobody waits for the model any more.")
        self._report_progress("Loading weights", done / max(total, 1))

    def _run(self, plan: StepPlan) -> Pending:
        pending = self._worker.launch(plan)
        if pending.needs_masks:
            masks = self._masks.get()
            if masks is None:
                raise WorkerError("The rank was closed.")
            pending.take_masks(masks)
        return pending


def make_executor(config: EngineConfig, report_progress: ReportProgress) -> Executor:
    """Return the executor that `config` names, its ranks loaded and ready for plans."""
    if config.parallel.executor == "local":
        return LocalExecutor(config, report_progress)
    # Ray is loaded only where it is used.
    from cluster.ray_executor import RayExecutor

    return RayExecutor(config, report_progress)
