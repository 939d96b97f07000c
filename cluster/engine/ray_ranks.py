"""An epoch of a group: its actors and their channels.

Plans go over the step channel; Ray starts the actors and reports the cause of a death. Each epoch
has a secret, so that ranks of an older epoch cannot connect to a newer epoch.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from cluster.engine.executor import RankHealth
from cluster.engine.rank_channels import RankChannels, RayReports, log_rank_line
from cluster.engine.rank_monitor import RankMonitor
from pagedray.channel import ChannelClosedError
from pagedray.config import CacheSize, StepLimits
from pagedray.errors import DeviceError, HungRankError, StartupError, WorkerError
from pagedray.rank_progress import LoadProgress
from pagedray.step_listener import StepListener
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from cluster.engine.executor import ReportProgress
    from cluster.engine.rank_monitor import StartLimit
    from cluster.engine.rank_places import Actor, PoolMemories, RankPlaces, RecoveryLog, SpareRanks
    from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
    from pagedray.config import EngineConfig, KernelReport
    from pagedray.node_memory import MemoryAddress
    from pagedray.rank_roofline import RankRoofline
    from workers.parallel.rendezvous import GroupAddress

__all__ = ["RayRanks", "cause_of", "check_same_weights"]

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 2.0
_POLL_S = 0.2
# Any: the type of Ray's references depends on how Ray was built.
Reference = Any
_LEAVE_TIMEOUT_S = 4.0
"""How long a rank may take to leave an epoch before it is ended."""
_ANSWER_TIMEOUT_S = 2.0
"""How long Ray may take beyond that to pass its answer on."""
# Any: the type of Ray's references depends on how Ray was built.
_Reference = Any
_CAUSE_TIMEOUT_S = 1.0
"""Ray reports the cause of a death shortly after the rank's socket closes."""
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?\.)(?:\s|$)")


class RayRanks:
    """The ranks of a group during one epoch."""

    def __init__(
        self,
        config: EngineConfig,
        places: RankPlaces,
        report_progress: ReportProgress,
        *,
        spares: SpareRanks,
        start_limit: StartLimit,
        memories: PoolMemories | None,
    ) -> None:
        """Call `start_ranks` or `replace_ranks` next. Without `memories`, CPU pools are private."""
        self._config = config
        self.places = places
        self._report_progress = report_progress
        self._spares = spares
        self._memories = memories
        self._size = config.parallel.tensor_parallel_size
        self._channels = RankChannels([])
        self._reports = RayReports(self._size)
        self._monitor = RankMonitor(self._reports, config.parallel.device, start_limit)
        self._hang: HungRankError | None = None
        self._running: list[Reference] = []
        self._actors: list[Actor] = []
        self._recovery: RecoveryLog | None = None
        """Set until the first output of an epoch that replaced an earlier epoch."""

    def start_ranks(self) -> tuple[CacheSize, KernelReport]:
        """Start the ranks, load the model and connect.

        Returns the size of the cache, and which kernels compute the model.
        Raises WorkerError if a rank dies, in which case a retry may succeed, and StartupError.
        """
        with self._end_on_error():
            self._actors += (self.places.start_rank(rank) for rank in range(self._size))
            self._reports.attach_actors(self._actors, self.places.nodes)
            address = self._open_rendezvous()
            self._call(
                self._loading_progress,
                "load_rank",
                *((rank, 0, None, self._memory(rank)) for rank in self._ranks),
            )
            self._check_weights()
            self._join(address)
            limits = self._limits()
            sizes = self._call(_at("Measuring memory"), "available_cache", (limits,))
            cache = CacheSize(
                num_blocks=min(size.num_blocks for size in sizes),
                num_cpu_blocks=min(size.num_cpu_blocks for size in sizes),
                block_bytes=sum(size.block_bytes for size in sizes),
                limits=limits,
                # All ranks have the same layers.
                groups=sizes[0].groups,
                state_blocks=sizes[0].state_blocks,
            )
            blocks = cache.num_blocks, cache.num_cpu_blocks
            reports = self._call(_at("Allocating the KV cache"), "allocate_cache", blocks)
            self._note_pool_reports()
            # A single rank captures the others while it is idle.
            self._warm_up(captures_lazily=self._size == 1)
            self._spares.note_devices(self._actors, self.places)
            self._connect()
        # All ranks have the same backend and layers.
        return cache, reports[0]

    def replace_ranks(
        self, survivors: Mapping[int, Actor], cache: CacheSize, recovery: RecoveryLog
    ) -> None:
        """Start the ranks that are not among `survivors`, by rank, and join them to these.

        The survivors are of the last epoch and have left it. Raises as `start_ranks` does.
        """
        blocks = cache.num_blocks, cache.num_cpu_blocks
        # Ended with this epoch, also if the others do not start.
        self._actors += survivors.values()
        with self._end_on_error():
            places = {rank: (actor, 0) for rank, actor in survivors.items()}
            replaced = {}
            for rank in set(self._ranks) - set(survivors):
                spare = self._spares.take(rank, self.places)
                places[rank] = spare or (self.places.start_rank(rank), 0)
                replaced[rank] = "new process" if spare is None else "spare"
                self._actors.append(places[rank][0])
            self._actors = [places[rank][0] for rank in self._ranks]
            self._reports.attach_actors(self._actors, self.places.nodes)
            recovery.end_phase("processes")
            preparing = [
                actor.allocate_cache.remote(*blocks)
                if rank in survivors
                else actor.load_rank.remote(rank, device_index, cache, self._memory(rank))
                for rank, (actor, device_index) in sorted(places.items())
            ]
            address = self._open_rendezvous()
            self._results(preparing, _at("Loading weights"))
            self._check_weights()
            self._note_pool_reports()
            recovery.end_phase("loaded")
            self._join(address)
            recovery.end_phase("joined")
            parts = self._warm_up(captures_lazily=True)
            recovery.end_phase("warmed up")
            self._connect()
            recovery.end_phase("connected")
            # The ranks compute nothing until the controller sends a plan.
            recovery.wait_for_phase()
        recovery.note_ranks(kept=sorted(survivors), replaced=replaced, parts=parts)
        self._recovery = recovery

    def poll_ranks(self) -> tuple[int, list[DiskReport]]:
        """Return the last step that every rank has finished, and new reports on their files.

        Raises WorkerError if a rank has died.
        """
        self._exchange(0.0)
        return min(self._channels.acknowledged), self._channels.disk_reports.take_joined()

    def send_to_ranks(self, message: StepPlan | StepMasks) -> None:
        """Send a plan, or the masks of the last plan, to every rank; never waits for a rank.

        Raises WorkerError.
        """
        self._monitor.note_message(message)
        if self._recovery is not None:
            self._recovery.start_phase()
        try:
            self._channels.send(message)
        except ChannelClosedError as error:
            raise self._death(error) from error

    def collect_output(self) -> StepOutput:
        """Wait for the next output, which comes unless a rank hangs. Raises WorkerError."""
        outputs = self._channels.outputs
        while not outputs:
            self._exchange(_POLL_S)
        if self._recovery is not None:
            self._recovery.end_phase("first step")
            logger.info("%s", self._recovery)
            self._recovery = None
        return outputs.popleft()

    def measure_rooflines(self) -> list[RankRoofline]:
        """Measure the devices of all ranks at the same time, while no step runs.

        Raises WorkerError if a rank has died, and DeviceError if too little memory is free.
        """
        try:
            answers = ray.get([actor.measure_roofline.remote() for actor in self._actors])
        except RayError as error:
            raise WorkerError(f"A rank died: {cause_of(error)}") from error
        for answer in answers:
            if isinstance(answer, str):
                raise DeviceError(answer)
        return [answer for answer in answers if answer is not None]

    def observe_ranks(self, now_s: float) -> RankHealth:
        """Return whether the ranks make progress; if a rank hangs, other calls raise HungRankError.

        Called by another thread than the thread that sends plans.
        """
        if self._hang is None:
            health = self._monitor.observe(now_s)
            if not health.hang:
                return health
            self._hang = HungRankError(health.hang)
        return RankHealth(hang=str(self._hang))

    def end_epoch(self) -> dict[int, Actor]:
        """End the epoch after the death of a rank; return the ranks that can join another epoch.

        All other ranks are ended, whatever their state. All ranks are ended if no rank is found
        dead, since the cause is unknown.
        """
        # First, so that nothing that they still send counts.
        self._channels.close()
        actors, self._actors, self._running = self._actors, [], []
        hung = self._monitor.hung if self._hang is not None else []
        return end_actors(actors, hung=hung, reports=self._reports)

    def close(self) -> None:
        """End every rank, in any state."""
        if self._hang is not None:
            self._reports.kill_processes(self._monitor.hung)
        self._channels.shut_down()
        if self._running and self._hang is None:
            ray.wait(self._running, num_returns=len(self._running), timeout=_STOP_TIMEOUT_S)
        self._channels.close()
        for actor in self._actors:
            ray.kill(actor)
        self._reports.close()
        self._channels, self._running, self._actors = RankChannels([]), [], []

    @property
    def _ranks(self) -> range:
        return range(self._size)

    @contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """End all ranks if one of them cannot start. Raises WorkerError if a rank has died."""
        try:
            yield
        except HungRankError as error:
            self._hang = error
            self.close()
            raise
        except RayError as error:
            self.close()
            raise WorkerError(f"A rank died during startup: {cause_of(error)}") from error
        except BaseException:
            self.close()
            raise

    def _call(
        self, progress: Callable[[], tuple[str, float]], method: str, *arguments: tuple[Any, ...]
    ) -> list[Any]:
        """Call a method of every rank, with the arguments of each or the same for all."""
        by_rank = arguments if len(arguments) > 1 else (arguments or ((),)) * self._size
        references = [
            getattr(actor, method).remote(*mine)
            for actor, mine in zip(self._actors, by_rank, strict=True)
        ]
        return self._results(references, progress)

    def _limits(self) -> StepLimits:
        """Return the limits of a step: limits set by options, or the least that ranks choose."""
        chosen: list[StepLimits] = self._call(_at("Measuring memory"), "default_limits")
        return self._config.scheduler.limits(
            StepLimits(
                max_num_seqs=min(one.max_num_seqs for one in chosen),
                max_num_batched_tokens=min(one.max_num_batched_tokens for one in chosen),
            )
        )

    def _memory(self, rank: int) -> MemoryAddress | None:
        return None if self._memories is None else self._memories.address(rank)

    def _check_weights(self) -> None:
        digests = self._call(_at("Loading weights"), "weight_digests")
        check_same_weights(digests, self._config.model.folder)

    def _note_pool_reports(self) -> None:
        if self._memories is not None:
            self._memories.note_reports(self._call(_at("Allocating the KV cache"), "pool_report"))

    def _open_rendezvous(self) -> GroupAddress:
        opening = [self._actors[0].open_rendezvous.remote(self.places.hosts[0])]
        what = f"Starting {pluralize(self._size, 'rank')}"
        address: GroupAddress = self._results(opening, _at(what))[0]
        return address

    def _join(self, address: GroupAddress) -> None:
        """Connect the ranks.

        Raises WorkerError also if a rank cannot connect: another rank may just have died.
        """
        places = ((address, host) for host in self.places.hosts)
        try:
            self._call(_at("Connecting the ranks"), "join_group", *places)
        except StartupError as error:
            raise WorkerError(str(error)) from error

    def _warm_up(self, *, captures_lazily: bool) -> list[dict[str, float]]:
        progress = _at("Preparing the first steps")
        durations = self._call(progress, "warm_up", (captures_lazily,))
        for rank, lines in enumerate(self._call(progress, "take_log_lines")):
            for line in lines:
                log_rank_line(rank, line)
        return durations

    def _results(
        self, references: list[Reference], progress: Callable[[], tuple[str, float]]
    ) -> list[Any]:
        """Return the actors' results.

        Raises StartupError if a result is an error message. Raises HungRankError if a rank makes no
        progress. Reports progress meanwhile, which may raise to end the wait.
        """
        waiting = references
        while waiting:
            self._monitor.check_start()
            self._report_progress(*progress())
            finished, waiting = ray.wait(waiting, timeout=_POLL_S)
            # A rank that fails ends the wait for the others.
            for answer in ray.get(finished):
                if isinstance(answer, str):
                    raise StartupError(answer)
        return list(ray.get(references))

    def _loading_progress(self) -> tuple[str, float]:
        """Return a description of the ranks' work, and the finished part."""
        asking = [actor.load_progress.remote() for actor in self._actors]
        try:
            shown: list[LoadProgress] = ray.get(asking, timeout=_POLL_S)
        except GetTimeoutError:
            shown = [LoadProgress()]
        # One rank of a node downloads, and the others wait for it.
        downloads = [progress for progress in shown if progress.is_download]
        progress = max(downloads, key=lambda each: each.fraction, default=shown[0])
        return progress.what, progress.fraction

    def _connect(self) -> None:
        secret = secrets.token_bytes(32)
        with closing(StepListener(self.places.endpoint())) as listener:
            self._running = [
                actor.serve_controller.remote(listener.endpoint, secret) for actor in self._actors
            ]
            channels = listener.accept(
                self._size, secret, timeout_s=60.0, check=self._check_running
            )
        self._channels = RankChannels(channels)
        self._monitor.begin_steps()

    def _exchange(self, timeout_s: float) -> None:
        if self._hang is not None:
            raise self._hang
        try:
            self._channels.exchange(timeout_s)
        except ChannelClosedError as error:
            raise self._death(error) from error

    def _death(self, error: ChannelClosedError) -> WorkerError:
        return WorkerError(f"A rank died: {find_cause(self._running) or error}")

    def _check_running(self) -> None:
        """Report progress. Raises RayError if a rank has died."""
        self._report_progress("Starting the step loop", 0.0)
        finished, _ = ray.wait(self._running, timeout=0)
        ray.get(finished)


def _at(what: str) -> Callable[[], tuple[str, float]]:
    """Return the progress of work without parts."""
    return lambda: (what, 0.0)


def end_actors(
    actors: Sequence[Actor], *, hung: Sequence[int], reports: RayReports
) -> dict[int, Actor]:
    """End the ranks of an epoch, except ranks that can join another epoch; return these by rank.

    Ranks that are `hung` are killed at once. All ranks are ended if no rank is found dead, since
    the cause is unknown. Closes `reports`.
    """
    # A process that is stopped would not answer Ray, and would end only when it continues.
    reports.kill_processes(hung)
    for rank in hung:
        ray.kill(actors[rank])
    leaving: dict[int, _Reference] = {}
    if len(actors) > 1:
        leaving = {
            rank: actor.leave_epoch.remote(_LEAVE_TIMEOUT_S)
            for rank, actor in enumerate(actors)
            if rank not in hung
        }
    if leaving:
        ray.wait(
            list(leaving.values()),
            num_returns=len(leaving),
            timeout=_LEAVE_TIMEOUT_S + _ANSWER_TIMEOUT_S,
        )
    reports.kill_processes(
        [rank for rank, reference in leaving.items() if not _has_answered(reference)]
    )
    reports.close()
    survivors = {rank: actors[rank] for rank, reference in leaving.items() if _has_left(reference)}
    if len(survivors) == len(actors):
        survivors = {}
    for rank, actor in enumerate(actors):
        if rank not in survivors:
            ray.kill(actor)
    return survivors


def _has_answered(reference: _Reference) -> bool:
    finished, _ = ray.wait([reference], timeout=0)
    return bool(finished)


def _has_left(leaving: _Reference) -> bool:
    """Return whether a rank has left its epoch and can join another."""
    try:
        problem = ray.get([leaving], timeout=0)[0]
    except GetTimeoutError:
        problem = "it did not answer."
    except RayError:
        # It has died, and why is known from the end of its steps.
        return False
    if problem is not None:
        logger.warning("Also replacing a rank that was still alive: %s", problem)
    return problem is None


# Any: the type of Ray's references depends on how Ray was built.
def find_cause(running: Sequence[Any]) -> str | None:
    """Return why one of the ranks of `running` has died; None if Ray gives no reason."""
    deadline_s = time.monotonic() + _CAUSE_TIMEOUT_S
    cause: RayError | None = None
    waiting = list(running)
    while waiting and (left_s := deadline_s - time.monotonic()) > 0.0:
        finished, waiting = ray.wait(waiting, timeout=left_s)
        for reference in finished:
            try:
                ray.get(reference)
            except RayActorError as death:
                return cause_of(death)
            except RayError as failure:
                # Its steps failed, which may be because another rank has died.
                cause = failure
    return None if cause is None else cause_of(cause)


def cause_of(error: RayError) -> str:
    """Return Ray's cause of death in one sentence."""
    text = str(error)
    if found := _EXIT_DETAIL.search(text):
        return found[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.') if lines else type(error).__name__}."


def check_same_weights(digests: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Raise StartupError for a file of which two ranks have loaded different versions.

    `digests` has one of each file, for each rank.
    """
    first = digests[0]
    for rank, other in enumerate(digests):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise StartupError(
                    f"{folder / name} differs between rank 0 and rank {rank}: the file has "
                    "changed since one of them loaded it, or their nodes have different copies. "
                    "All ranks need the same weights."
                )
