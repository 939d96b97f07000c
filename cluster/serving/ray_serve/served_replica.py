"""The base class of our deployments: an engine, and the methods that Serve itself calls."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from ray import serve

from cluster.engine.open_engine import make_executor
from cluster.serving.ray_serve.load_watchdog import LoadWatchdog
from cluster.serving.ray_serve.ray_metrics import RayMetrics
from cluster.serving.ray_serve.replica_engine import ReplicaEngine
from cluster.serving.ray_serve.routing.leases import Leases
from cluster.serving.ray_serve.routing.replica_calls import current_call_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from ray.util.placement_group import PlacementGroup

    from cluster.engine.executor import Executor, ReportProgress
    from cluster.serving.ray_serve.options import ServeArguments
    from pagedray.config import EngineConfig

__all__ = ["ServedReplica"]

Item = TypeVar("Item")


class ServedReplica:
    """A replica without frontends. Its methods are coroutines, so Serve runs them on its loop."""

    @staticmethod
    def make_executor(
        config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None
    ) -> Executor:
        """Return an executor with loaded ranks.

        Raises StartupError.
        """
        return make_executor(config, report_progress, placement)

    async def __init__(self, arguments: ServeArguments) -> None:  # type: ignore[misc]  # Serve awaits it
        self._leases = Leases(arguments.serve.lease_s)
        with LoadWatchdog(timeout_s=arguments.serve.load_timeout_s):
            self._replica = await ReplicaEngine.started(arguments, self.make_executor)
        self._is_stopped = False
        context = serve.get_replica_context()
        self._metrics = RayMetrics(
            self._replica.servicer.metrics,
            {"deployment": context.deployment, "replica": context.replica_tag},
        )
        self._metrics.start_reports()

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed or is stalled."""
        self._replica.check_progress()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load by which TokensPolicy scales."""
        return self._replica.current_load().metrics()

    async def record_routing_stats(self) -> dict[str, float]:
        """Return the load by which AffinityRouter routes."""
        return self._replica.routing_stats()

    async def renew(self, call_ids: Sequence[str]) -> None:
        """Renew the leases of calls, given by Serve's ids."""
        self._leases.renew(frozenset(call_ids))

    @asynccontextmanager
    async def _leased(self, items: AsyncGenerator[Item]) -> AsyncIterator[AsyncGenerator[Item]]:
        """Yield the stream of the current call, which is cancelled if its lease expires."""
        with self._leases.held(current_call_id()):
            async with aclosing(items):
                yield items

    async def __del__(self) -> None:
        """Close the engine; Serve calls this once requests have ended or the drain timed out."""
        if hasattr(self, "_replica") and not self._is_stopped:
            self._is_stopped = True
            await self._metrics.stop_reports()
            await self._replica.close()
