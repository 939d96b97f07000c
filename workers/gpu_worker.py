"""The Ray actor around one rank.

Ray places, starts and ends it. Plans arrive over the step channel, which one thread serves until
the controller sends a shutdown or disconnects. When another rank of the group has died, this one
leaves the epoch and joins the next with the weights that it has.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pagedray.errors import StartupError
from pagedray.machine import leave_removed_folder, raise_descriptor_limit
from pagedray.rank_progress import LoadProgress, Phase, PoolReport, ProgressWord
from pagedray.step_listener import connect
from workers.parallel.rendezvous import (
    LOOPBACK,
    FileRendezvous,
    GroupAddress,
    Rendezvous,
    SocketRendezvous,
)
from workers.rank_lifecycle import RankLifecycle, capture_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.batch import RankLogLine
    from pagedray.config import CacheSize, EngineConfig, KernelReport, StepLimits
    from pagedray.node_memory import MemoryAddress
    from pagedray.rank_roofline import RankRoofline

__all__ = ["GpuWorker"]

Result = TypeVar("Result")
_CONNECT_TIMEOUT_S = 30.0
_ORPHAN_POLL_S = 1.0
_STEPS_END_S = 0.3
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

_INTERVAL_S = 0.5
_NUM_QUIET_BEATS = 2
"""Heartbeats without progress of the rank after which to look for a compiler process."""


class GpuWorker:
    """A rank as an actor, or a spare for a rank.

    The executor wraps it with `ray.remote`. Errors of configuration are returned as text: Ray would
    wrap an exception in a traceback.
    """

    def __init__(self, config: EngineConfig) -> None:
        raise_descriptor_limit()
        leave_removed_folder()
        self._log = capture_log()
        # One thread does all the computing: each thread that computes has an OpenMP team of its
        # own, and two teams would be more threads than cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._progress = ProgressWord()
        start_heartbeat(self._progress)
        self._rank = RankLifecycle(config, self._progress)
        self._rendezvous: Rendezvous | None = None
        self._has_controller = False
        threading.Thread(target=self._end_if_orphaned, args=(os.getppid(),), daemon=True).start()

    def visible_devices(self) -> str:
        """Return the devices that Ray has assigned to this process, as CUDA reads them."""
        return os.environ.get(_VISIBLE_DEVICES, "")

    def import_libraries(self, visible_devices: str) -> None:
        """Import the libraries of a rank; a spare does this in advance.

        `visible_devices` are all devices that the rank may have to use: CUDA reads them only once.
        """
        if visible_devices:
            os.environ[_VISIBLE_DEVICES] = visible_devices
        self._run(self._rank.import_libraries)

    def open_rendezvous(self, host: str) -> GroupAddress:
        """Listen on `host`, an address of this node; return the address and port of the group."""
        if self._rendezvous is not None:
            # Left from a start that failed.
            self._rendezvous.close()
        # On one node, a socket on the loopback would be open to all its users.
        self._rendezvous = FileRendezvous() if host == LOOPBACK else SocketRendezvous(host)
        return self._rendezvous.address

    def load_progress(self) -> LoadProgress:
        """Return how much of its model this rank has downloaded or loaded."""
        return self._rank.load_progress

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
        return self._answer(self._rank.load, rank, device_index, cache, memory)

    def weight_digests(self) -> dict[str, str]:
        """Return a digest of each file that the weights were loaded from."""
        return self._rank.weight_digests

    def join_group(self, address: GroupAddress, host: str) -> str | None:
        """Join the group; return an error message or None.

        `address` is the rendezvous; other ranks reach this rank at `host`.
        """
        rendezvous, self._rendezvous = self._rendezvous, None
        return self._answer(self._rank.join_group, address, host, rendezvous)

    def default_limits(self) -> StepLimits:
        """Return the limits of a step where no option sets them."""
        return self._run(self._rank.default_limits)

    def available_cache(self, limits: StepLimits) -> str | CacheSize:
        """Return the size of the pools that fit on this rank, or an error message."""
        return self._answer(self._rank.available_cache, limits)

    def pool_report(self) -> PoolReport:
        """Return the state of the rank's CPU pool when its cache was allocated."""
        return self._rank.pool_report

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> str | KernelReport:
        """Allocate both pools; return the report of the worker, or an error message."""
        return self._answer(self._rank.allocate_cache, num_blocks, num_cpu_blocks)

    def warm_up(self, captures_lazily: bool) -> dict[str, float]:
        """Prepare the first steps; return how long each part of the rank's start took, by name."""
        return self._run(self._rank.warm_up, captures_lazily)

    def take_log_lines(self) -> list[RankLogLine]:
        """Return the log lines of this rank; while a controller is served, the rank sends them."""
        return self._log.take_lines()

    def measure_roofline(self) -> str | RankRoofline | None:
        """Return the roofline of a decoder, an error message, or None.

        Runs while `serve_controller` waits for plans.
        """
        return _or_message(self._rank.measure_roofline)

    def serve_controller(self, endpoint: str, secret: bytes) -> None:
        """Connect to the controller and run its plans until it shuts down or disconnects."""
        self._run(self._serve_controller, endpoint, secret)

    def leave_epoch(self, timeout_s: float) -> str | None:
        """Leave the group, which other ranks have left, and keep the weights.

        Returns why this rank cannot join another epoch, or None. The controller has disconnected
        before. Runs while `serve_controller` does.
        """
        deadline_s = time.monotonic() + timeout_s
        # The steps end by themselves unless the rank's thread waits for the device.
        wait([self._thread.submit(_nothing)], _STEPS_END_S)
        # A kernel that waits for a dead rank ends only when another thread aborts the collective,
        # which in turn returns only after the rank's thread has dropped its graphs.
        aborting = threading.Thread(target=self._rank.group.abort, daemon=True)
        aborting.start()
        try:
            self._thread.submit(self._rank.end_epoch).result(timeout_s)
            aborting.join(max(0.0, deadline_s - time.monotonic()))
        except TimeoutError:
            # Log the stacks of the waiting rank.
            faulthandler.dump_traceback()
            return f"Rank {self._rank.rank} did not leave its group within {timeout_s:g} s."
        except Exception as error:
            return f"Rank {self._rank.rank} cannot continue: {error}"
        if aborting.is_alive():
            faulthandler.dump_traceback()
            return f"The collectives of rank {self._rank.rank} did not end within {timeout_s:g} s."
        return self._rank.failure

    # Any: the arguments of the function.
    def _run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function in the computing thread, and return its result."""
        return self._thread.submit(self._called, function, *arguments).result()

    def _answer(self, function: Callable[..., Result], *arguments: Any) -> Result | str:
        """Return the result of `_run`, or the message of a StartupError."""
        return self._run(_or_message, function, *arguments)

    def _called(self, function: Callable[..., Result], *arguments: Any) -> Result:
        result = function(*arguments)
        self._progress.enter(Phase.STARTED)
        return result

    def _serve_controller(self, endpoint: str, secret: bytes) -> None:
        channel = connect(endpoint, self._rank.rank, secret, _CONNECT_TIMEOUT_S)
        self._has_controller = True
        try:
            self._rank.serve_steps(channel, self._log)
        finally:
            self._has_controller = False

    def _end_if_orphaned(self, raylet_pid: int) -> None:
        # Ray ends an actor only a minute after its raylet has died, and the actor would keep its
        # memory until then. The rank still serves its controller.
        while self._has_controller or os.getppid() == raylet_pid:
            time.sleep(_ORPHAN_POLL_S)
        os._exit(1)


# Any: as above
def _or_message(function: Callable[..., Result], *arguments: Any) -> Result | str:
    """Return the result of a function, or the message of a StartupError."""
    try:
        return function(*arguments)
    except StartupError as error:
        return str(error)


def _nothing() -> None:
    pass


def start_heartbeat(progress: ProgressWord) -> None:
    """Write heartbeats for as long as the process lives."""
    threading.Thread(
        target=_beat_forever, args=(progress,), name="pagedray-heartbeat", daemon=True
    ).start()


def _beat_forever(progress: ProgressWord) -> None:
    # Waiting for an event, unlike sleeping, is not affected by a change of the clock.
    never = threading.Event()
    word, num_quiet = -1, 0
    while True:
        num_quiet = num_quiet + 1 if progress.word == word else 0
        word = progress.word
        progress.beat(is_compiling=num_quiet >= _NUM_QUIET_BEATS and _has_children())
        never.wait(_INTERVAL_S)


def _has_children() -> bool:
    """Return whether this process waits for others: compilers, such as nvcc, ptxas or gcc."""
    try:
        threads = tuple(Path("/proc/self/task").iterdir())
    except OSError:
        # This process may open no more files.
        return False
    for thread in threads:
        try:
            if (thread / "children").read_text().strip():
                return True
        except OSError:
            # The thread has ended, or the kernel has no such file.
            continue
    return False
