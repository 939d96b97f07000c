"""PagedRay on Ray Serve, in a Ray cluster that this process starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psutil
import ray

from tests.chaos.targets.target import Holdings, Target, named
from tests.system.serve_cluster import ServeCluster

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServeTarget"]


class ServeTarget(Target):
    """Two or more replicas behind Serve's proxies."""

    name = "serve"

    def __init__(
        self,
        arguments: Mapping[str, object],
        *,
        model: str,
        num_replicas: int,
        num_ranks: int,
        num_gpus: int,
    ) -> None:
        """`num_ranks` are the rank processes of one replica."""
        self._arguments = dict(arguments) | {"num_replicas": num_replicas}
        self.model = model
        self.num_servers = num_replicas
        self.num_ranks = num_replicas * num_ranks
        self._num_gpus = num_gpus
        self._cluster = ServeCluster()
        self.grpc_target, self.url = self._cluster.grpc_target, self._cluster.url

    def start(self) -> None:
        # Placement wants a CPU for each replica and each of its ranks, however busy they are.
        ray.init(
            num_cpus=self.num_servers + self.num_ranks + 2,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._cluster.start()
        self._cluster.deploy(**self._arguments)

    def stop(self) -> None:
        self._cluster.__exit__(None, None, None)
        ray.shutdown()

    def servers(self) -> list[psutil.Process]:
        return named(self.family(), "ServeReplica")

    def family(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    async def holdings(self, key: str) -> Holdings:
        loads = await self._cluster.loads(key)
        return Holdings(
            num_calls=sum(len(one.calls) for one in loads),
            num_blocks=sum(one.num_blocks for one in loads),
            num_free_blocks=sum(one.num_free_blocks for one in loads),
        )
