"""Where the ranks of a group are: bundles, nodes, addresses, and the processes started there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagedray.errors import WorkerError
from workers.gpu_worker import GpuWorker
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from pagedray.config import EngineConfig

__all__ = ["Actor", "RankPlaces"]

# Any: the methods of actor handles are created at run time.
Actor = Any


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
