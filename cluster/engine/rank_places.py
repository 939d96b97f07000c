"""Places and processes of a group of ranks: nodes, spare processes, memory that outlives ranks."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagedray.errors import WorkerError
from pagedray.node_memory import NodeMemory
from workers.gpu_worker import GpuWorker
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ray.util.placement_group import PlacementGroup

    from pagedray.config import EngineConfig
    from pagedray.node_memory import MemoryAddress
    from pagedray.rank_progress import PoolReport

__all__ = ["Actor", "PoolMemories", "RankPlaces", "RecoveryLog", "SpareRanks"]

logger = logging.getLogger(__name__)

# Any: the methods of actor handles are created at run time.
Actor = Any
_PING_TIMEOUT_S = 1.0

_LEAST_S = 0.005
"""Shorter parts of a rank's start are left out."""


class RankPlaces:
    """The last bundles of a placement group, a bundle for each rank, as placed at present."""

    def __init__(self, config: EngineConfig, placement: PlacementGroup) -> None:
        """Raises WorkerError while the group has no node for a rank, after a node has died."""
        self._config = config
        self._placement = placement
        self._size = config.parallel.tensor_parallel_size
        # Earlier bundles are not for ranks, such as the controller's.
        self._first_bundle = placement.bundle_count - self._size
        self._node_of_bundle = placement_group_table(placement)["bundles_to_node_id"]
        self.nodes: list[str] = [
            self._node_of_bundle[self._first_bundle + rank] for rank in range(self._size)
        ]
        """The node of each rank."""
        self.hosts = self._hosts()
        """The address of each rank for the other ranks: loopback on a single node."""

    def endpoint(self) -> str:
        """Return the controller's endpoint: a Unix socket if all is on its node, else TCP."""
        if set(self._node_of_bundle.values()) == {ray.get_runtime_context().get_node_id()}:
            return "unix:"
        return f"tcp:{ray.util.get_node_ip_address()}:0"

    def start_rank(self, rank: int) -> Actor:
        """Start the process of a rank, with a device of its own."""
        num_gpus = 1 if self._config.parallel.device == "cuda" else 0
        return self._start(rank, num_cpus=1, num_gpus=num_gpus)

    def start_spare(self, node: str) -> Actor:
        """Start a process on a node of the group that has no device."""
        return self._start(self.nodes.index(node), num_cpus=0, num_gpus=0)

    def _hosts(self) -> list[str]:
        addresses = {
            node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]
        }
        for rank, node in enumerate(self.nodes):
            if node not in addresses:
                raise WorkerError(f"The node of rank {rank} has left the Ray cluster.")
        if len(set(self.nodes)) == 1:
            return [LOOPBACK] * self._size
        return [addresses[node] for node in self.nodes]

    def _start(self, rank: int, *, num_cpus: int, num_gpus: int) -> Actor:
        # Two threads: a thread runs steps, the other answers Ray.
        return (
            ray.remote(GpuWorker)
            .options(
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                max_concurrency=2,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement,
                    placement_group_bundle_index=self._first_bundle + rank,
                ),
            )
            .remote(self._config)
        )


class PoolMemories:
    """The memories of the CPU pools, by rank."""

    def __init__(self, num_ranks: int) -> None:
        self._memories: list[NodeMemory | None] = [self._make_memory() for _ in range(num_ranks)]
        self._is_lost = False
        """Whether some rank has a new pool."""

    def address(self, rank: int) -> MemoryAddress | None:
        """Return where a rank finds its memory, or None if there is none."""
        memory = self._memories[rank]
        return None if memory is None else memory.address

    def note_reports(self, reports: Sequence[PoolReport]) -> None:
        """Note the reports of ranks about their pools, by rank, before they serve steps."""
        for rank, report in enumerate(reports):
            # The memory is older than the rank's own pool: no later rank may find it.
            if not report.is_shared and (memory := self._memories[rank]) is not None:
                memory.close()
                self._memories[rank] = self._make_memory()
            self._is_lost = self._is_lost or not report.is_kept

    def take_kept(self) -> bool:
        """Return whether every rank has the pool that it had.

        Covers all reports since the last call: a rank may have died after its report, and the next
        rank has kept a pool that was new.
        """
        are_kept, self._is_lost = not self._is_lost, False
        return are_kept

    def renew(self) -> None:
        """Give the next ranks other memory, and free this memory, which no rank uses."""
        self.close()
        self._memories = [self._make_memory() for _ in self._memories]

    def close(self) -> None:
        """Free the memory once no rank uses it. May be called twice."""
        for memory in self._memories:
            if memory is not None:
                memory.close()

    def _make_memory(self) -> NodeMemory | None:
        try:
            return NodeMemory("cpu-pool")
        except OSError as error:
            logger.warning("The CPU pools will not outlive their ranks: %s.", error.strerror)
            return None


class SpareRanks:
    """The spares of a group, by node."""

    def __init__(self, num_per_node: int) -> None:
        self._num_per_node = num_per_node
        self._device_of: dict[tuple[str, int], str] = {}
        """The device that Ray assigned to each rank, by node and rank."""
        # Any: a reference of Ray.
        self._spares: dict[str, list[tuple[Actor, Any]]] = defaultdict(list)
        """Each with the reference that resolves when its imports are done."""

    def note_devices(self, ranks: list[Actor], places: RankPlaces) -> None:
        """Ask the ranks of the first epoch which devices Ray has assigned to their bundles."""
        if self._num_per_node:
            devices = ray.get([actor.visible_devices.remote() for actor in ranks])
            for rank, (node, device) in enumerate(zip(places.nodes, devices, strict=True)):
                self._device_of[node, rank] = device

    def fill(self, places: RankPlaces) -> None:
        """Start the spares that are missing; returns before they have started."""
        if not self._num_per_node:
            return
        for node in set(places.nodes):
            spares = self._spares[node]
            spares[:] = (spare for spare in spares if _is_alive(*spare))
            while len(spares) < self._num_per_node:
                actor = places.start_spare(node)
                visible = ",".join(self._devices_of(node))
                spares.append((actor, actor.import_libraries.remote(visible)))

    def take(self, rank: int, places: RankPlaces) -> tuple[Actor, int] | None:
        """Return a spare on the node of a rank, and the index of the rank's device in the spare.

        None if there is no spare. The caller ends the spare.
        """
        node = places.nodes[rank]
        # Ray may have moved the bundle to another node.
        device = self._device_of.get((node, rank))
        spares = self._spares[node]
        while spares and device is not None:
            actor, imported = spares.pop(0)
            if _is_alive(actor, imported):
                return actor, self._devices_of(node).index(device)
            ray.kill(actor)
        return None

    def close(self) -> None:
        """End every spare."""
        for spares in self._spares.values():
            for actor, _ in spares:
                ray.kill(actor)
        self._spares.clear()

    def _devices_of(self, node: str) -> list[str]:
        """Return the devices of the ranks on a node, each once; on CPUs all of them are empty."""
        devices = (device for (place, _), device in self._device_of.items() if place == node)
        return list(dict.fromkeys(devices))


def _is_alive(actor: Actor, imported: Any) -> bool:  # Any: a reference of Ray
    """Return whether a spare lives; a starting spare counts."""
    finished, _ = ray.wait([imported], timeout=0)
    if not finished:
        return True
    try:
        ray.get(imported)
        ray.get(actor.load_progress.remote(), timeout=_PING_TIMEOUT_S)
    except RayError:
        return False
    return True


class RecoveryLog:
    """The phases of a replacement of ranks, in order, with the parts of each rank."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase_started_s = clock()
        self._is_waiting = False
        self._phases: dict[str, float] = {}
        self._replaced: dict[int, str] = {}
        self._kept: list[int] = []
        self._parts: list[Mapping[str, float]] = []

    def wait_for_phase(self) -> None:
        """Let the next phase begin with `start_phase`; the time until then counts to none."""
        self._is_waiting = True

    def start_phase(self) -> None:
        """Begin a phase that was waited for; otherwise have no effect."""
        if self._is_waiting:
            self._phase_started_s = self._clock()
            self._is_waiting = False

    def end_phase(self, name: str) -> None:
        """Give the time since the last phase ended to the phase `name`."""
        now_s = self._clock()
        self._phases[name] = now_s - self._phase_started_s
        self._phase_started_s = now_s

    def note_ranks(
        self,
        *,
        kept: Sequence[int],
        replaced: Mapping[int, str],
        parts: Sequence[Mapping[str, float]],
    ) -> None:
        """Note the ranks that stayed, the replaced ranks, and the parts of each rank."""
        self._kept, self._replaced, self._parts = list(kept), dict(replaced), list(parts)

    def __str__(self) -> str:
        """Return one line with all figures in seconds."""
        total_s = sum(self._phases.values())
        kept = f", kept {_listed(self._kept)}" if self._kept else ""
        what = ", ".join(f"{rank} ({how})" for rank, how in sorted(self._replaced.items()))
        parts = "".join(
            f"; rank {rank}: {figures}"
            for rank, times in enumerate(self._parts)
            if (figures := _figures(times))
        )
        return (
            f"Replaced {'rank' if len(self._replaced) == 1 else 'ranks'} {what}{kept} in "
            f"{total_s:.2f} s: {_figures(self._phases)}{parts}."
        )


def _figures(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {time_s:.2f}" for name, time_s in times.items() if time_s >= _LEAST_S)


def _listed(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
