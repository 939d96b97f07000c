"""The Ray actor around one rank.

Ray places, starts and ends it. Plans arrive over the step channel, which one thread serves until
the controller sends a shutdown or disconnects. When another rank of the group has died, this one
leaves the epoch and joins the next with the weights that it has.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pagedray.batch import WorkerFailure
from pagedray.channel import ChannelClosedError
from pagedray.errors import StartupError
from pagedray.load_progress import LoadProgress
from pagedray.rank_progress import MAX_INDEX, Phase, ProgressWord
from pagedray.step_listener import connect
from pagedray.system.descriptor_limit import raise_descriptor_limit
from workers.heartbeat import start_heartbeat
from workers.hub.download_line import DownloadLine
from workers.parallel.rendezvous import LOOPBACK, FileRendezvous, SocketRendezvous
from workers.step_server import serve_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from pagedray.config import AttentionReport, CacheSize, EngineConfig
    from pagedray.node_memory import MemoryAddress
    from pagedray.pool_report import PoolReport
    from pagedray.rank_roof import RankRoof
    from workers.parallel.group import ParallelGroup
    from workers.parallel.one_shot import RowShape
    from workers.parallel.rendezvous import GroupAddress, Rendezvous
    from workers.worker import Worker

__all__ = ["GpuWorker"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CONNECT_TIMEOUT_S = 30.0
_ORPHAN_POLL_S = 1.0
_STEPS_END_S = 0.3
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class GpuWorker:
    """One rank as an actor, or a spare that becomes one. The executor wraps it with `ray.remote`.

    Errors of configuration are returned as text: Ray would wrap an exception in a traceback.
    """

    def __init__(self, config: EngineConfig) -> None:
        raise_descriptor_limit()
        self._config = config
        self._rank = 0
        self._group: ParallelGroup | None = None
        self._worker: Worker | None = None
        # One thread does all the computing: each thread that computes has an OpenMP team of its
        # own, and two teams would be more threads than cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._load_progress = LoadProgress()
        self._progress = ProgressWord()
        start_heartbeat(self._progress)
        self._rendezvous: Rendezvous | None = None
        self._failure: str | None = None
        """Why this rank cannot join another epoch."""
        self._durations: dict[str, float] = {}
        self._has_controller = False
        threading.Thread(target=self._end_if_orphaned, args=(os.getppid(),), daemon=True).start()

    def visible_devices(self) -> str:
        """Return the devices that Ray has assigned to this process, as CUDA reads them."""
        return os.environ.get(_VISIBLE_DEVICES, "")

    def import_libraries(self, visible_devices: str) -> None:
        """Import what a rank needs; a spare does this before it is needed.

        `visible_devices` are those that it may have to use: CUDA reads them only once.
        """
        if visible_devices:
            os.environ[_VISIBLE_DEVICES] = visible_devices
        self._run(self._import_libraries)

    def open_rendezvous(self, host: str) -> GroupAddress:
        """Listen on `host`, an address of this node; return the address and port of the group."""
        if self._rendezvous is not None:
            # Of a start that failed.
            self._rendezvous.close()
        # On one node, a socket on the loopback would be open to all its users.
        self._rendezvous = FileRendezvous() if host == LOOPBACK else SocketRendezvous(host)
        return self._rendezvous.address

    def load_progress(self) -> LoadProgress:
        """Return how far this rank is with its model."""
        return self._load_progress

    def attach_board(self, board: MemoryAddress, rank: int) -> None:
        """Show the progress of an epoch as that of `rank` on the controller's board."""
        self._progress.attach(board, rank)

    def read_progress(self) -> tuple[int, ...]:
        """Return the rank's cells, for a controller on another node."""
        return self._progress.cells()

    def load_rank(
        self,
        rank: int,
        device_index: int,
        cache: CacheSize | None,
        memory: MemoryAddress | None = None,
    ) -> str | None:
        """Load the weights of a rank, and allocate its cache if the size is known.

        `device_index` is its place among the visible devices; `memory` is for its CPU pool. Returns
        an error message or None.
        """
        return self._run(self._load_rank, rank, device_index, cache, memory)

    def join_group(self, address: GroupAddress, host: str) -> str | None:
        """Join the group; return an error message or None.

        `address` is the rendezvous; `host` is the address where other ranks reach this one.
        """
        return self._run(self._join_group, address, host)

    def default_max_num_seqs(self) -> int:
        """Return the maximum number of sequences in a step, if no option says it."""
        return self._run(self._default_max_num_seqs)

    def available_cache(self, max_num_seqs: int) -> str | CacheSize:
        """Return the size of the pools that fit on this rank, or an error message."""
        return self._run(self._available_cache, max_num_seqs)

    def pool_report(self) -> PoolReport:
        """Return what became of the rank's CPU pool when its cache was allocated."""
        assert self._worker is not None
        return self._worker.pool_report

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> str | AttentionReport:
        """Allocate both pools; return what `Worker.allocate_cache` does, or an error message."""
        return self._run(self._allocate_cache, num_blocks, num_cpu_blocks)

    def warm_up(self, captures_lazily: bool) -> dict[str, float]:
        """Prepare the first steps; return how long each part of the rank's start took, by name."""
        return self._run(self._warm_up, captures_lazily)

    def measure_roof(self) -> str | RankRoof | None:
        """Return what `Worker.measure_roof` does, or an error message.

        Runs while `serve_controller` waits for plans.
        """
        assert self._worker is not None
        try:
            return self._worker.measure_roof()
        except StartupError as error:
            return str(error)

    def serve_controller(self, endpoint: str, secret: bytes) -> None:
        """Connect to the controller and run its plans until it shuts down or disconnects."""
        self._run(self._serve_controller, endpoint, secret)

    def leave_epoch(self, timeout_s: float) -> str | None:
        """Leave the group, which other ranks have left, and keep the weights.

        Returns why this rank cannot join another epoch, or None. The controller has disconnected
        before. Runs while `serve_controller` does.
        """
        self._durations = {}
        deadline_s = time.monotonic() + timeout_s
        assert self._group is not None
        # The steps end by themselves unless the rank's thread waits for the device.
        wait([self._submit(_nothing)], _STEPS_END_S)
        # A kernel that waits for a dead rank ends only when another thread aborts the collective,
        # which in turn returns only after the rank's thread has dropped its graphs.
        aborting = threading.Thread(target=self._group.abort, daemon=True)
        aborting.start()
        try:
            self._submit(self._end_epoch).result(timeout_s)
            aborting.join(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            # Into the rank's log: what it waits for.
            faulthandler.dump_traceback()
            return f"Rank {self._rank} did not leave its group within {timeout_s:g} s."
        except Exception as error:
            return f"Rank {self._rank} cannot continue: {error}"
        if aborting.is_alive():
            faulthandler.dump_traceback()
            return f"The collectives of rank {self._rank} did not end within {timeout_s:g} s."
        return self._failure

    # Any: the arguments are those of the function.
    def _submit(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        return self._thread.submit(function, *arguments)

    def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:  # Any: as above
        result: Result = self._submit(self._called, function, *arguments).result()
        return result

    def _called(self, function: Callable[..., Result], *arguments: Any) -> Result:  # Any: as above
        result = function(*arguments)
        self._progress.enter(Phase.STARTED)
        return result

    def _import_libraries(self) -> None:
        # The process that creates the actor imports no torch.
        from workers.imports import import_libraries

        with self._timed("imports"):
            import_libraries(self._config)

    def _load_rank(
        self,
        rank: int,
        device_index: int,
        cache: CacheSize | None,
        memory: MemoryAddress | None,
    ) -> str | None:
        self._durations = {}
        self._import_libraries()
        from workers.freed_memory import with_freed_memory

        try:
            self._rank = rank
            self._fetch_weights()
            if cache is None:
                self._load_weights(device_index, memory)
            else:
                self._config = self._config.with_max_num_seqs(cache.max_num_seqs)
                with_freed_memory(self._load_weights, device_index, memory)
                with_freed_memory(self._allocate_pools, cache.num_blocks, cache.num_cpu_blocks)
        except StartupError as error:
            return str(error)
        return None

    def _fetch_weights(self) -> None:
        from workers.weights.local_weights import with_local_weights

        if self._config.model.hub is None:
            return
        self._progress.enter(Phase.DOWNLOADING)
        line = DownloadLine(self._config.model.hub.id)

        def report(done: int, total: int) -> None:
            self._load_progress = LoadProgress(line.text(done), done, total, is_download=True)

        with self._timed("download"):
            self._config = with_local_weights(self._config, report)
        self._progress.enter(Phase.STARTING)

    def _load_weights(self, device_index: int, memory: MemoryAddress | None) -> None:
        import torch

        from workers.parallel.group_factory import make_group
        from workers.worker import rank_device
        from workers.worker_factory import make_worker

        # Those of an attempt that failed hold memory.
        self._worker = self._group = None
        with self._timed("device"):
            device = rank_device(self._config, device_index)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.cuda.synchronize()
        with self._timed("model"):
            size = self._config.parallel.tensor_parallel_size
            self._group = make_group(
                self._rank, size, device=device, progress=self._progress, rows=self._summed_rows()
            )
            self._worker = make_worker(self._config, self._group, device)
            if memory is not None:
                self._worker.use_pool_memory(memory)
        with self._timed("weights"):
            self._worker.load_weights(self._report)

    def _summed_rows(self) -> RowShape | None:
        """Return the rows that the one-shot kernel sums over the ranks, or None if NCCL does."""
        import torch

        from workers.parallel.one_shot import RowShape

        if self._config.parallel.all_reduce == "nccl":
            return None
        model = self._config.model
        return RowShape(model.hidden_size, getattr(torch, model.dtype))

    def _join_group(self, address: GroupAddress, host: str) -> str | None:
        assert self._group is not None
        rendezvous, self._rendezvous = self._rendezvous, None
        try:
            with self._timed("group"):
                self._group.join(address, host=host, rendezvous=rendezvous)
        except StartupError as error:
            return str(error)
        return None

    def _default_max_num_seqs(self) -> int:
        assert self._worker is not None
        return self._worker.default_max_num_seqs

    def _available_cache(self, max_num_seqs: int) -> str | CacheSize:
        assert self._worker is not None
        try:
            return self._worker.available_cache(max_num_seqs)
        except StartupError as error:
            return str(error)

    def _allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> str | AttentionReport:
        try:
            return self._allocate_pools(num_blocks, num_cpu_blocks)
        except StartupError as error:
            return str(error)

    def _allocate_pools(self, num_blocks: int, num_cpu_blocks: int) -> AttentionReport:
        assert self._worker is not None
        with self._timed("cache"):
            return self._worker.allocate_cache(num_blocks, num_cpu_blocks)

    def _warm_up(self, captures_lazily: bool) -> dict[str, float]:
        assert self._worker is not None
        with self._timed("kernels"):
            self._worker.warm_up()
        with self._timed("graphs"):
            self._worker.capture_graphs(only_largest=captures_lazily)
        return self._durations

    def _serve_controller(self, endpoint: str, secret: bytes) -> None:
        from workers.parallel.group import GroupBrokenError

        assert self._worker is not None
        channel = connect(endpoint, self._rank, secret, _CONNECT_TIMEOUT_S)
        self._has_controller = True
        pool = self._worker.host_pool
        if pool is not None and pool.mapped is not None:
            # The controller has this rank's report.
            pool.mapped.confirm()
        try:
            serve_steps(self._worker, channel, self._progress, is_first=self._rank == 0)
            self._worker.close()
        except ChannelClosedError:
            logger.warning("Rank %s lost the connection to its controller.", self._rank)
        except GroupBrokenError as error:
            logger.warning("Rank %s lost the connection to another rank: %s", self._rank, error)
            # The controller disconnects first if it knows that a rank hangs.
            with suppress(ChannelClosedError):
                channel.send(WorkerFailure(str(error), is_peer=True))
        except Exception as error:
            self._failure = f"Rank {self._rank} failed: {error}"
            with suppress(ChannelClosedError):
                channel.send(WorkerFailure(traceback.format_exc(limit=-6)))
            raise
        finally:
            self._has_controller = False
            channel.close()

    def _end_if_orphaned(self, raylet_pid: int) -> None:
        # Ray ends an actor whose raylet has died only after a minute, in which it would keep its
        # memory. Until then it serves the controller that it has.
        while self._has_controller or os.getppid() == raylet_pid:
            time.sleep(_ORPHAN_POLL_S)
        os._exit(1)

    def _end_epoch(self) -> None:
        assert self._worker is not None
        with self._timed("left"):
            self._worker.end_epoch()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        yield
        self._durations[name] = time.perf_counter() - started_s

    def _report(self, done: int, total: int) -> None:
        self._load_progress = LoadProgress(done=done, total=total)
        self._progress.enter(Phase.LOADING, min(done, MAX_INDEX))


def _nothing() -> None:
    pass
