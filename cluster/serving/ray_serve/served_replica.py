"""The base class of our deployments: an engine, and the methods that Serve itself calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeVar

from ray import serve
from ray.util.metrics import Gauge

from cluster.engine.open_engine import make_executor
from cluster.serving.ray_serve.load_watchdog import LoadWatchdog
from cluster.serving.ray_serve.replica_calls import current_call_id
from cluster.serving.ray_serve.replica_engine import ReplicaEngine

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Collection,
        Iterator,
        Mapping,
        Sequence,
    )

    from ray.util.placement_group import PlacementGroup

    from cluster.engine.executor import Executor, ReportProgress
    from cluster.serving.ray_serve.options import ServeArguments
    from cluster.serving.telemetry.metrics import Metrics
    from pagedray.config import EngineConfig

__all__ = ["ServedReplica"]

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
_PERIOD_S = 5.0
# Ray allows no colons in names; creation times of counters are left out.
_NAME = re.compile(r"pagedray_\w+(?<!_created)")

_CHECKS_PER_LEASE = 10


class ServedReplica:
    """A replica without frontends. Its methods are coroutines, so Serve runs them on its loop."""

    @staticmethod
    def make_executor(
        config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None
    ) -> Executor:
        """Return an executor with loaded ranks. Raises StartupError."""
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


class RayMetrics:
    """Exports one replica's metrics periodically on the running event loop."""

    def __init__(self, metrics: Metrics, tags: Mapping[str, str]) -> None:
        """`tags` identify the replica."""
        self._metrics = metrics
        self._tags = dict(tags)
        self._gauges: dict[str, Gauge] = {}
        self._task: asyncio.Task[None] | None = None

    def start_reports(self) -> None:
        """Start exporting periodically."""
        self._task = asyncio.create_task(self._report_on())

    async def stop_reports(self) -> None:
        """Stop to export. Stopping twice is harmless."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def report_metrics(self) -> None:
        """Export the current values."""
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                if _NAME.fullmatch(sample.name):
                    gauge = self._gauge(sample.name, family.documentation, tuple(sample.labels))
                    gauge.set(sample.value, {**sample.labels, **self._tags})

    async def _report_on(self) -> None:
        while True:
            self.report_metrics()
            await asyncio.sleep(_PERIOD_S)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...]) -> Gauge:
        gauge = self._gauges.get(name)
        if gauge is None:
            gauge = Gauge(name, text or name, tag_keys=(*labels, *self._tags))
            self._gauges[name] = gauge
        return gauge


class Leases:
    """The leased calls of one replica. Used from the event loop only."""

    def __init__(self, lease_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """A call is cancelled when it has not been renewed for half of `lease_s`.

        Its caller stops renewing it when it has not been read for `lease_s`.
        """
        self._unheard_s = lease_s / 2
        self._clock = clock
        self._leases: set[_Lease] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        # Another router than ours does not renew calls.
        self._are_renewed = False

    @contextmanager
    def held(self, call_id: str | None) -> Iterator[None]:
        """Cancel the current task if its call is not renewed while the block runs.

        A call without an id cannot be renewed and has no lease.
        """
        if call_id is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        lease = _Lease(call_id, task, self._clock())
        self._leases.add(lease)
        self._schedule_check()
        try:
            yield
        finally:
            self._leases.discard(lease)

    def renew(self, call_ids: Collection[str]) -> None:
        """Renew the leases of calls."""
        self._are_renewed = True
        now_s = self._clock()
        for lease in self._leases:
            if lease.call_id in call_ids:
                lease.renewed_s = now_s

    def _schedule_check(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            period_s = self._unheard_s / _CHECKS_PER_LEASE
            self._due_s = self._clock() + period_s
            self._timer = loop.call_later(period_s, self._check)

    def _check(self) -> None:
        self._timer = None
        # Renewals that arrived while this process was paused have not been read yet.
        late_s = self._clock() - self._due_s
        if late_s > self._unheard_s / _CHECKS_PER_LEASE:
            for lease in self._leases:
                lease.renewed_s += late_s
        begin_s = self._clock() - self._unheard_s
        late = {one for one in self._leases if self._are_renewed and one.renewed_s < begin_s}
        for lease in late:
            logger.warning("Cancelled a stream because its caller stopped renewing the lease.")
            lease.task.cancel()
        self._leases -= late
        if self._leases:
            self._schedule_check()


class _Lease:
    """The lease of a call."""

    __slots__ = ("call_id", "renewed_s", "task")

    def __init__(self, call_id: str, task: asyncio.Task[object], now_s: float) -> None:
        self.call_id = call_id
        self.task = task
        self.renewed_s = now_s
