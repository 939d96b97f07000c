"""PagedRay on Ray Serve, in a Ray cluster that this process starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from pagedray.errors import PagedRayError
from tests.chaos.targets import Holdings, Target, named, tracebacks_in
from tests.system.serve_cluster import ServeCluster

_ASK_S = 2.0
_PACKAGES = ("attention", "cluster", "pagedray", "workers")


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
        self._logs = Path()
        self.grpc_target, self.url = self._cluster.grpc_target, self._cluster.url

    def start(self) -> None:
        # Placement wants a CPU for each replica and each of its ranks, however busy they are.
        ray.init(
            address="local",
            num_cpus=self.num_servers + self.num_ranks + 2,
            num_gpus=self._num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        self._logs = Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]  # it is there
        self._cluster.start()
        self._cluster.deploy(**self._arguments)

    def stop(self) -> None:
        self._cluster.__exit__(None, None, None)
        ray.shutdown()

    def servers(self) -> list[psutil.Process]:
        replicas = named(self.family(), "ServeReplica")
        # Those that load their model hold no request, and are no replacement yet.
        starting = named(replicas, "initialize_and_get_metadata")
        return [one for one in replicas if one not in starting]

    def family(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    def tracebacks(self) -> list[str]:
        # Serve logs its own, such as of calls to a replica that has not loaded its model yet.
        found = (one for log in self._replica_logs() for one in tracebacks_in(log))
        return [one for one in found if any(f"/{package}/" in one for package in _PACKAGES)]

    async def holdings(self, key: str) -> Holdings:
        loads = await self._cluster.loads(key)
        return Holdings(
            num_calls=sum(len(one.calls) for one in loads),
            num_blocks=sum(one.num_blocks for one in loads),
            num_free_blocks=sum(one.num_free_blocks for one in loads),
        )

    async def all_serve(self, key: str) -> bool:
        # The proxy is ready as soon as one replica is.
        try:
            loads = await asyncio.wait_for(self._cluster.loads(key), _ASK_S)
        except (TimeoutError, RayError, PagedRayError):
            return False
        return len(loads) == self.num_servers and all(one.is_ready for one in loads)

    def _replica_logs(self) -> list[Path]:
        """Return the logs of the replicas, in which their requests' errors are."""
        return sorted(self._logs.glob("serve/replica_*.log"))
