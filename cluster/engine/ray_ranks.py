"""One epoch of a group: its actors, their channels, and the cause of their death.

Plans go over the step channel; Ray starts the actors and reports why one has died. Each epoch
has a secret, so that ranks of an older epoch cannot connect to a newer one.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.engine.rank_channels import RankChannels
from pagedray.channel import ChannelClosedError, StepListener
from pagedray.config import CacheSize
from pagedray.errors import StartupError, WorkerError
from workers.gpu_worker import GpuWorker
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from pathlib import Path

    from ray.util.placement_group import PlacementGroup

    from cluster.engine.executor import ReportProgress
    from pagedray.batch import EmbedOutput, EmbedPlan, StepMasks, StepOutput, StepPlan
    from pagedray.config import EngineConfig

__all__ = ["RayRanks"]

_START_TIMEOUT_S = 600.0
_STEP_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 2.0
_POLL_S = 0.2
_EXIT_DETAIL = re.compile(r"Worker exit detail: (.+?\.)(?:\s|$)")

# Any: the methods of actor handles are created at run time.
Actor = Any
Reference = Any


class RayRanks:
    """The ranks of a group during one epoch."""

    def __init__(
        self,
        config: EngineConfig,
        placement: PlacementGroup,
        folder: Path,
        report_progress: ReportProgress,
    ) -> None:
        """Start the ranks, load the model and connect; a Unix socket is created in `folder`.

        Raises WorkerError if a rank dies, in which case a retry may succeed, and StartupError.
        """
        self._config = config
        self._report_progress = report_progress
        self._size = config.parallel.tensor_parallel_size
        self._channels = RankChannels([])
        self._running: list[Reference] = []
        self._actors: list[Actor] = []
        try:
            self.hosts = _hosts(placement, self._size)
            """The address at which the other ranks reach each rank."""
            self._actors += (self._actor(placement, rank) for rank in range(self._size))
            self.cache_size, self.attention_providers = self._load()
            self._connect(_endpoint(placement, folder))
        except RayError as error:
            self.close()
            raise WorkerError(f"A rank died during startup: {_cause_of(error)}") from error
        except BaseException:
            self.close()
            raise

    @property
    def acknowledged_step(self) -> int:
        """The last step that every rank has finished. Raises WorkerError if a rank has died."""
        self._exchange(0.0)
        return min(self._channels.acknowledged)

    def send_to_ranks(self, message: StepPlan | StepMasks | EmbedPlan) -> None:
        """Send a plan, or the masks of the last one, to every rank; never waits for a rank.

        Raises WorkerError.
        """
        try:
            self._channels.send(message)
        except ChannelClosedError as error:
            raise self._death(error) from error

    def collect_output(self) -> StepOutput | EmbedOutput:
        """Wait for the next output. Raises WorkerError."""
        deadline_s = time.monotonic() + _STEP_TIMEOUT_S
        outputs = self._channels.outputs
        while not outputs:
            self._exchange(_POLL_S)
            if not outputs and time.monotonic() > deadline_s:
                raise WorkerError(f"No step finished within {_STEP_TIMEOUT_S:g} s.")
        return outputs.popleft()

    def close(self) -> None:
        """End every rank, in any state."""
        self._channels.shut_down()
        if self._running:
            ray.wait(self._running, num_returns=len(self._running), timeout=_STOP_TIMEOUT_S)
        self._channels.close()
        for actor in self._actors:
            ray.kill(actor)
        self._channels, self._running, self._actors = RankChannels([]), [], []

    def _actor(self, placement: PlacementGroup, rank: int) -> Actor:
        # Earlier bundles are not for ranks, such as the controller's.
        first_bundle = placement.bundle_count - self._size
        # Two threads: one runs steps, the other answers Ray.
        return (
            ray.remote(GpuWorker)
            .options(
                num_cpus=1,
                num_gpus=1 if self._config.parallel.device == "cuda" else 0,
                max_concurrency=2,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=first_bundle + rank
                ),
            )
            .remote(self._config, rank)
        )

    def _load(self) -> tuple[CacheSize, dict[str, dict[str, int]]]:
        starting = [self._actors[0].open_rendezvous.remote(self.hosts[0])]
        (address,) = self._results(starting, f"Starting {_ranks(self._size)}", lambda: 0.0)
        loading = [
            actor.start_rank.remote(address, host)
            for actor, host in zip(self._actors, self.hosts, strict=True)
        ]
        sizes = self._results(loading, "Loading weights", self._loaded_fraction)
        cache_size = CacheSize(
            num_blocks=min(size.num_blocks for size in sizes),
            num_cpu_blocks=min(size.num_cpu_blocks for size in sizes),
            block_bytes=sum(size.block_bytes for size in sizes),
        )
        allocating = [
            actor.allocate_cache.remote(cache_size.num_blocks, cache_size.num_cpu_blocks)
            for actor in self._actors
        ]
        providers = self._results(allocating, "Allocating the KV cache", lambda: 0.0)
        # All ranks have the same backend and layers.
        return cache_size, providers[0]

    def _results(self, references: list[Reference], what: str, fraction: Any) -> list[Any]:
        """Return the actors' results. Raises StartupError if one is an error message.

        Reports progress meanwhile, which may raise to end the wait.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        waiting = references
        while waiting:
            if time.monotonic() > deadline_s:
                raise StartupError(f"{what} took more than {_START_TIMEOUT_S:g} s.")
            self._report_progress(what, fraction())
            finished, waiting = ray.wait(waiting, timeout=_POLL_S)
            # A rank that fails ends the wait for the others.
            for answer in ray.get(finished):
                if isinstance(answer, str):
                    raise StartupError(answer)
        return list(ray.get(references))

    def _loaded_fraction(self) -> float:
        try:
            done, total = ray.get(self._actors[0].load_progress.remote(), timeout=_POLL_S)
        except GetTimeoutError:
            return 0.0
        return float(done / total) if total else 0.0

    def _connect(self, endpoint: str) -> None:
        secret = secrets.token_bytes(32)
        with closing(StepListener(endpoint)) as listener:
            self._running = [
                actor.serve_controller.remote(listener.endpoint, secret) for actor in self._actors
            ]
            channels = listener.accept(
                self._size, secret, timeout_s=60.0, check=self._check_running
            )
        self._channels = RankChannels(channels)

    def _exchange(self, timeout_s: float) -> None:
        try:
            self._channels.exchange(timeout_s)
        except ChannelClosedError as error:
            raise self._death(error) from error

    def _death(self, error: ChannelClosedError) -> WorkerError:
        # Ray reports the cause of death shortly after the socket closes.
        finished, _ = ray.wait(self._running, timeout=1.0)
        for reference in finished:
            try:
                ray.get(reference)
            except RayError as cause:
                return WorkerError(f"A rank died: {_cause_of(cause)}")
        return WorkerError(f"A rank died: {error}")

    def _check_running(self) -> None:
        """Report progress. Raises RayError if a rank has died."""
        self._report_progress("Connecting", 0.0)
        finished, _ = ray.wait(self._running, timeout=0)
        ray.get(finished)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _hosts(placement: PlacementGroup, size: int) -> list[str]:
    """Return the address of each rank for the other ranks: loopback on a single node."""
    node_of_bundle = placement_group_table(placement)["bundles_to_node_id"]
    first_bundle = placement.bundle_count - size
    nodes = [node_of_bundle[first_bundle + rank] for rank in range(size)]
    if len(set(nodes)) == 1:
        return [LOOPBACK] * size
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [addresses[node] for node in nodes]


def _endpoint(placement: PlacementGroup, folder: Path) -> str:
    """Return the controller's endpoint: a Unix socket if all ranks are on its node, else TCP."""
    nodes = placement_group_table(placement)["bundles_to_node_id"].values()
    if set(nodes) == {ray.get_runtime_context().get_node_id()}:
        return f"unix:{folder / 'steps'}"
    return f"tcp:{ray.util.get_node_ip_address()}:0"


def _cause_of(error: RayError) -> str:
    """Return Ray's cause of death in one sentence."""
    text = str(error)
    if found := _EXIT_DETAIL.search(text):
        return found[1]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.') if lines else type(error).__name__}."
