"""The life of a rank, from its imports to the end of an epoch, with the time of each part.

It does not know Ray. The computing thread calls everything but `measure_roofline`. The process that
creates the actor of a rank imports this module without torch.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pagedray.batch import RankLogLine, Shutdown, StepAck, StepMasks, WorkerFailure
from pagedray.channel import ChannelClosedError, WorkerChannel
from pagedray.rank_progress import MAX_INDEX, LoadProgress, Phase, PoolReport, ProgressWord
from workers.hub.locate import DownloadLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.config import CacheSize, EngineConfig, KernelReport, StepLimits
    from pagedray.node_memory import MemoryAddress
    from pagedray.rank_roofline import RankRoofline
    from workers.decoder_worker import DecoderWorker
    from workers.parallel.group import ParallelGroup
    from workers.parallel.peer_memory import RowShape
    from workers.parallel.rendezvous import GroupAddress, Rendezvous
    from workers.runner.disk_jobs import DiskJobs
    from workers.worker import PendingStep, Worker

__all__ = ["RankLifecycle", "RankLog", "capture_log", "serve_steps"]

logger = logging.getLogger(__name__)

_POLL_S = 5e-5
"""Interval of polling for the end of a step while no plan arrives."""
_IDLE_S = 0.05
"""Time without a step after which idle time is used; shorter pauses are between steps."""

_PACKAGES = ("attention", "pagedray", "workers")
_MAX_LINES = 1000


class RankLifecycle:
    """Takes one rank through its start and its epochs. Methods may raise StartupError."""

    def __init__(self, config: EngineConfig, progress: ProgressWord) -> None:
        self._config = config
        self._progress = progress
        self.rank = 0
        """The number of the rank in its group, once it loads."""
        self.load_progress = LoadProgress()
        """How far it is with its model."""
        self.failure: str | None = None
        """Why the process cannot join another epoch; None if it can."""
        self.durations: dict[str, float] = {}
        """Seconds of each part since `load` or `end_epoch` began, by name."""
        self.weight_digests: dict[str, str] = {}
        """A digest of each file that its weights were loaded from."""
        self._group: ParallelGroup | None = None
        self._worker: Worker | None = None

    @property
    def group(self) -> ParallelGroup:
        """The group, which may be joined once the model is loaded."""
        assert self._group is not None
        return self._group

    @property
    def worker(self) -> Worker:
        """The worker that holds the loaded model."""
        assert self._worker is not None
        return self._worker

    @property
    def decoder(self) -> DecoderWorker | None:
        """The worker of a model that generates, or None."""
        from workers.decoder_worker import DecoderWorker

        return self.worker if isinstance(self.worker, DecoderWorker) else None

    @property
    def pool_report(self) -> PoolReport:
        """The state of the CPU pool after the cache was allocated."""
        return PoolReport() if self.decoder is None else self.decoder.pool_report

    def import_libraries(self) -> None:
        """Import the libraries that the rank may need, before its model is known."""
        from workers.startup import import_libraries, uncollected_imports

        with self._timed("imports"), uncollected_imports():
            import_libraries(self._config)

    def load(
        self, rank: int, device_index: int, cache: CacheSize | None, memory: MemoryAddress | None
    ) -> None:
        """Load the weights of a rank, and allocate its cache if the size is known.

        `device_index` is its place among the visible devices; `memory` is for its CPU pool.
        """
        from workers.startup import begin_context, import_modules, uncollected_imports

        self.durations = {}
        if self._config.parallel.device == "cuda":
            begin_context(device_index)
        with self._timed("imports"), uncollected_imports():
            import_modules(self._config)
        from workers.memory_profile import wait_for_gpu_memory

        self.rank = rank
        self._fetch_weights()
        if cache is None:
            self._load_weights(device_index, memory)
        else:
            self._config = self._config.with_limits(cache.limits)
            wait_for_gpu_memory(self._load_weights, device_index, memory)
            wait_for_gpu_memory(self.allocate_cache, cache.num_blocks, cache.num_cpu_blocks)

    def join_group(self, address: GroupAddress, host: str, rendezvous: Rendezvous | None) -> None:
        """Join the group at `address`, where rank 0 has opened the `rendezvous`.

        Other ranks reach this rank at `host`.
        """
        with self._timed("group"):
            self.group.join(address, host=host, rendezvous=rendezvous)

    def default_limits(self) -> StepLimits:
        """Return the limits of a step where no option sets them."""
        return self.worker.default_limits

    def available_cache(self, limits: StepLimits) -> CacheSize:
        """Return the size of the pools that fit on this rank."""
        return self.worker.available_cache(limits)

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> KernelReport:
        """Allocate both pools, and return the report on the attention kernels."""
        with self._timed("cache"):
            return self.worker.allocate_cache(num_blocks, num_cpu_blocks)

    def warm_up(self, captures_lazily: bool) -> dict[str, float]:
        """Prepare the first steps, and return `durations`."""
        with self._timed("kernels"):
            self.worker.warm_up()
        with self._timed("graphs"):
            self.worker.capture_graphs(only_largest=captures_lazily)
        return self.durations

    def measure_roofline(self) -> RankRoofline | None:
        """Return the roofline of a decoder, or None.

        Any thread may call it while no step runs.
        """
        return None if self.decoder is None else self.decoder.measure_roofline()

    def serve_steps(self, channel: WorkerChannel, log: RankLog) -> None:
        """Run the plans of a channel, and close it, until it or the group ends.

        Raises the errors of a step; then the rank cannot join another epoch.
        """
        from workers.parallel.group import GroupBrokenError

        decoder = self.decoder
        pool = None if decoder is None else decoder.host_pool
        if pool is not None and pool.mapped is not None:
            # The controller has this rank's report.
            pool.mapped.confirm()
        try:
            serve_steps(
                self.worker,
                channel,
                self._progress,
                log,
                sends_outputs=self.rank == 0,
                disk=None if decoder is None else decoder.disk_jobs,
            )
            self.worker.close()
        except ChannelClosedError:
            logger.warning("Rank %s lost the connection to its controller.", self.rank)
        except GroupBrokenError as error:
            logger.warning("Rank %s lost the connection to another rank: %s", self.rank, error)
            # The controller disconnects first if it knows that a rank hangs.
            with suppress(ChannelClosedError):
                channel.send(WorkerFailure(str(error), is_peer=True))
        except Exception as error:
            self.failure = f"Rank {self.rank} failed: {error}"
            with suppress(ChannelClosedError):
                channel.send(WorkerFailure(traceback.format_exc(limit=-6)))
            raise
        finally:
            channel.close()

    def end_epoch(self) -> None:
        """Drop all but the weights, and leave the group, of which other ranks are gone."""
        self.durations = {}
        with self._timed("left"):
            self.worker.end_epoch()

    def _fetch_weights(self) -> None:
        from workers.hub.locate import with_local_weights

        if self._config.model.hub is None:
            return
        self._progress.enter(Phase.DOWNLOADING)
        line = DownloadLine(self._config.model.hub.id)

        def report(done: int, total: int) -> None:
            self.load_progress = LoadProgress(line.text(done), done, total, is_download=True)

        with self._timed("download"):
            self._config = with_local_weights(self._config, report)
        self._progress.enter(Phase.STARTING)

    def _load_weights(self, device_index: int, memory: MemoryAddress | None) -> None:
        import torch

        from workers.embedding_worker import make_worker
        from workers.parallel.process_group import make_group
        from workers.worker import rank_device

        with self._timed("device"):
            device = rank_device(self._config, device_index)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.synchronize()
        with self._timed("model"):
            size = self._config.parallel.tensor_parallel_size
            self._group = make_group(
                self.rank, size, device=device, progress=self._progress, rows=self._summed_rows()
            )
            self._worker = make_worker(self._config, self._group, device, memory)
        try:
            with self._timed("weights"):
                self.weight_digests = self._worker.load_weights(self._report_loading)
        except BaseException:
            # The next attempt needs the memory.
            self._worker = self._group = None
            raise

    def _summed_rows(self) -> RowShape | None:
        """Return the rows that the one-shot kernel sums over the ranks, or None if NCCL does."""
        import torch

        from workers.parallel.peer_memory import RowShape

        if self._config.parallel.all_reduce == "nccl":
            return None
        model = self._config.model
        return RowShape(model.hidden_size, getattr(torch, model.dtype))

    def _report_loading(self, done: int, total: int) -> None:
        self.load_progress = LoadProgress(done=done, total=total)
        self._progress.enter(Phase.LOADING, min(done, MAX_INDEX))

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self.durations[name] = time.perf_counter() - started_s


def serve_steps(
    worker: Worker,
    channel: WorkerChannel,
    progress: ProgressWord,
    log: RankLog,
    *,
    sends_outputs: bool,
    disk: DiskJobs | None = None,
) -> None:
    """Run plans in order until a Shutdown arrives; send the reports of `disk`.

    A step's output is sent as soon as it is ready, by the rank of a group that `sends_outputs`, and
    its acknowledgement once its block copies have ended too; a plan that arrives before is launched
    after the running step. A step that needs masks gets them before the next plan, and after the
    outputs of all earlier steps are sent, since masks depend on these. Between plans, the worker
    uses its idle time. Lines of the log are sent between steps.
    """
    _StepServer(worker, channel, progress, log, sends_outputs=sends_outputs, disk=disk).serve()


class _StepServer:
    """The running steps of a rank, and finished steps with running copies."""

    def __init__(
        self,
        worker: Worker,
        channel: WorkerChannel,
        progress: ProgressWord,
        log: RankLog,
        *,
        sends_outputs: bool,
        disk: DiskJobs | None,
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._progress = progress
        self._log = log
        self._sends_outputs = sends_outputs
        self._disk = disk
        self._pending: deque[PendingStep] = deque()
        self._copying: deque[tuple[int, PendingStep]] = deque()
        self._uses_idle_time = False
        """Whether it has, since the last message."""

    def serve(self) -> None:
        """Launch plans and send the results of ended steps until a Shutdown arrives."""
        self._progress.enter(Phase.IDLE)
        while True:
            if self._send_what_ended():
                continue
            # Waiting for the step alone would launch the next one too late and leave the device
            # idle.
            if self._is_busy and not self._channel.has_message():
                time.sleep(_POLL_S)
                continue
            if not self._channel.has_message(0.0 if self._uses_idle_time else _IDLE_S):
                self._uses_idle_time = self._worker.use_idle_time()
                self._progress.enter(Phase.IDLE)
                if self._uses_idle_time:
                    continue
            message = self._channel.receive()
            self._uses_idle_time = False
            if isinstance(message, Shutdown):
                return
            assert not isinstance(message, StepMasks)
            launched = self._worker.launch(message)
            if launched.needs_masks and not self._receive_masks(launched):
                return
            self._progress.enter(Phase.DEVICE)
            self._pending.append(launched)

    @property
    def _is_busy(self) -> bool:
        has_steps = bool(self._pending or self._copying)
        return has_steps or (self._disk is not None and self._disk.are_pending)

    def _send_what_ended(self) -> bool:
        """Send lines, an acknowledgement, a report or an output; return False if none is ready."""
        if self._log.has_lines:
            for line in self._log.take_lines():
                self._channel.send(line)
            return True
        if self._copying and self._copying[0][1].is_copied:
            self._channel.send(StepAck(self._copying.popleft()[0]))
            self._await_copies()
            return True
        if self._disk is not None and (report := self._disk.take_report()) is not None:
            self._channel.send(report)
            return True
        if self._pending and (self._pending[0].is_ready or len(self._pending) > 1):
            self._send_output(self._pending.popleft())
            return True
        return False

    def _send_output(self, finished: PendingStep) -> None:
        output = finished.output()
        self._progress.enter(Phase.SENDING)
        if self._sends_outputs:
            self._channel.send(output)
        if not output.is_acknowledged:
            self._copying.append((output.step, finished))
        else:
            # The copies of earlier steps have ended too.
            self._copying.clear()
            if not self._sends_outputs:
                self._channel.send(StepAck(output.step))
        self._await_copies()
        self._progress.finish_step(output.step)
        self._progress.enter(Phase.DEVICE if self._pending else Phase.IDLE)

    def _await_copies(self) -> None:
        self._progress.await_copies(self._copying[0][0] if self._copying else None)

    def _receive_masks(self, launched: PendingStep) -> bool:
        """Give a step its masks; return False if a Shutdown arrives in their place."""
        while self._pending:
            self._send_output(self._pending.popleft())
        self._progress.enter(Phase.MASKS)
        masks = self._channel.receive()
        if isinstance(masks, Shutdown):
            return False
        assert isinstance(masks, StepMasks)
        launched.take_masks(masks)
        return True


class RankLog(logging.Handler):
    """Keeps the log records of a rank until its controller takes them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[RankLogLine] = deque(maxlen=_MAX_LINES)

    @property
    def has_lines(self) -> bool:
        """Whether anything was logged since the last call of `take_lines`."""
        return bool(self._lines)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, in place of the oldest record if there are too many."""
        self._lines.append(RankLogLine(record.levelno, self.format(record)))

    def take_lines(self) -> list[RankLogLine]:
        """Return the lines logged since the last call."""
        # Other threads may log meanwhile.
        return [self._lines.popleft() for _ in range(len(self._lines))]


def capture_log() -> RankLog:
    """Return the log of this process from now on; warnings also go to standard error.

    That is all that is left of a rank that dies.
    """
    log = RankLog()
    for name in _PACKAGES:
        package = logging.getLogger(name)
        package.setLevel(logging.INFO)
        package.addHandler(log)
        if logging.lastResort is not None:
            package.addHandler(logging.lastResort)
    return log
