"""The engine and servicer inside the process of a Ray Serve replica.

It owns the placement of ranks, startup and shutdown. It does not know the frontends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import time
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ray import serve
from ray.util.metrics import Gauge
from ray.util.placement_group import get_current_placement_group

from cluster.engine.engine_options import engine_config
from cluster.engine.frozen_heap import freeze_heap
from cluster.engine.open_engine import make_executor, open_engine
from cluster.engine.watchdog import ProgressClock
from cluster.serving.auth import ANONYMOUS, Authenticator
from cluster.serving.engine_client import EngineClient
from cluster.serving.inputs import CallOptions, with_served_names
from cluster.serving.ray_serve.autoscaling import ReplicaLoad
from cluster.serving.ray_serve.load_watchdog import LoadWatchdog
from cluster.serving.ray_serve.replica_calls import current_call_id
from cluster.serving.servicer import Servicer
from cluster.serving.telemetry.log_lines import logging_to
from cluster.serving.telemetry.tracing import otlp_tracer
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import EngineError, StartupError

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

    from cluster.engine.engine_loop import EngineLoop
    from cluster.engine.executor import Executor, ReportProgress
    from cluster.engine.open_engine import MakeExecutor
    from cluster.serving.ray_serve.options import ServeArguments
    from cluster.serving.telemetry.metrics import Metrics
    from pagedray.config import EngineConfig

__all__ = ["ProgressWatch", "ServedReplica"]

logger = logging.getLogger(__name__)

_REPLACE_TIMEOUT_S = 900.0
"""Includes loading the weights of new ranks."""
_CLOSE_GRACE_S = 2.0
_MAX_TICK_S = 15.0
"""Serve checks every 5 s. A longer time is a pause of the replica or of the machine."""

Item = TypeVar("Item")
_PERIOD_S = 5.0
# Ray allows no colons in names; creation times of counters are left out.
_NAME = re.compile(r"pagedray_\w+(?<!_created)")
_CHECKS_PER_LEASE = 10


class ReplicaEngine:
    """A servicer, its engine, and the ranks."""

    def __init__(self, arguments: ServeArguments, config: EngineConfig) -> None:
        self.config = config
        options = arguments.serve
        self._tracer = otlp_tracer(options.otlp_endpoint)
        self._client = EngineClient(asyncio.get_running_loop())
        self._authenticator = Authenticator(
            None if options.api_keys is None else Path(options.api_keys)
        )
        self.servicer = Servicer(
            self._client,
            Tokenizer.from_config(config),
            config,
            CallOptions(
                tool_format=options.tool_call_format, reasoning_format=options.reasoning_format
            ),
            authenticator=self._authenticator,
            tracer=self._tracer,
        )
        self._watch = ProgressWatch(
            stall_timeout_s=options.stall_timeout_s, replace_timeout_s=_REPLACE_TIMEOUT_S
        )
        self._engine: EngineLoop | None = None
        self._frozen = ExitStack()
        # Last, because a constructor that raises is not closed.
        self._log = ExitStack()
        self._log.enter_context(logging_to(form=options.log_format, level=options.log_level))

    @classmethod
    async def started(cls, arguments: ServeArguments, make_executor: MakeExecutor) -> ReplicaEngine:
        """Return a replica that is ready. Raises StartupError."""
        # Ray knows the placement group of this actor in this thread only.
        placement = get_current_placement_group()
        config = await asyncio.to_thread(engine_config, arguments.model, arguments.engine)
        config = with_served_names(config, arguments.serve.served_names)
        replica = cls(arguments, config)
        try:
            await replica._start(make_executor, placement)
        except BaseException:
            await replica.close()
            raise
        return replica

    async def _start(self, make_executor: MakeExecutor, placement: PlacementGroup | None) -> None:
        self.servicer.warm_up()
        _check_bundles(self.config, placement)
        self._engine = await asyncio.to_thread(
            open_engine,
            self.config,
            self._client,
            _log_progress,
            placement=placement,
            make_executor=make_executor,
        )
        self._client.attach_engine(self._engine)
        # As in `cluster/cli/server.py`.
        gc.collect()
        self._frozen.enter_context(freeze_heap())
        self.servicer.set_ready()

    def check_progress(self) -> None:
        """Raise EngineError if the engine has failed or is stalled.

        Also reloads a changed key file, since Serve calls this often enough.
        """
        self._authenticator.reload_if_changed()
        engine = self._engine
        if engine is None:
            raise EngineError("The engine has not been started.")
        if engine.error is not None:
            raise engine.error
        stats = engine.stats()
        scheduler = stats.scheduler
        problem = self._watch.problem(
            num_steps=stats.num_steps,
            has_work=scheduler.num_running + scheduler.num_waiting + scheduler.num_swapped > 0,
            is_healthy=engine.is_healthy,
            now_s=time.monotonic(),
        )
        if problem is not None:
            raise EngineError(problem)

    def current_load(self) -> ReplicaLoad:
        """Return the load by which the deployment scales."""
        return ReplicaLoad.from_loads(self.servicer.loads(ANONYMOUS), self._tokens_per_block)

    def routing_stats(self) -> dict[str, float]:
        """Return the load by which routers choose among replicas, and when it was measured."""
        num_slots = self.servicer.loads(ANONYMOUS).num_blocks * self._tokens_per_block
        return {
            "load": self.current_load().tokens_in_flight / max(num_slots, 1),
            "reported_s": time.monotonic(),
        }

    @property
    def _tokens_per_block(self) -> float:
        num_groups = 1 if self._engine is None else self._engine.stats().num_groups
        return self.config.cache.block_size / num_groups

    async def close(self) -> None:
        """Abort running requests and close the engine. Closing twice is harmless."""
        engine, self._engine = self._engine, None
        tracer, self._tracer = self._tracer, None
        await self.servicer.drain(_CLOSE_GRACE_S if engine is not None else 0.0)
        # Device memory of a closed rank is freed by the collector.
        self._frozen.close()
        if engine is not None:
            await asyncio.to_thread(engine.close)
        await self.servicer.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        self._log.close()


def _check_bundles(config: EngineConfig, placement: PlacementGroup | None) -> None:
    """Raise StartupError unless the placement group has a bundle for the replica and each rank."""
    num_ranks = config.parallel.tensor_parallel_size
    if config.parallel.executor == "local" or placement is None:
        return
    if placement.bundle_count <= num_ranks:
        raise StartupError(
            f"placement_group_bundles has {placement.bundle_count} bundles, but a replica needs "
            f"{num_ranks + 1}: one for itself and one for each rank."
        )


def _log_progress(what: str, fraction: float) -> None:
    logger.debug("%s: %.0f %%", what, fraction * 100)


class ProgressWatch:
    """Measures for how long an engine has run no step, and for how long it was not healthy."""

    def __init__(self, *, stall_timeout_s: float, replace_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._replace_timeout_s = replace_timeout_s
        self._steps = ProgressClock(max_tick_s=_MAX_TICK_S)
        self._health = ProgressClock(max_tick_s=_MAX_TICK_S)

    def problem(
        self, *, num_steps: int, has_work: bool, is_healthy: bool, now_s: float
    ) -> str | None:
        """Return an error message, or None if the engine makes progress.

        An engine without work, or that replaces its ranks, runs no steps.
        """
        may_rest = not (has_work and is_healthy)
        still_s = self._steps.silence_s(now_s, num_steps, is_expected=may_rest)
        unhealthy_s = self._health.silence_s(now_s, None, is_expected=is_healthy)
        if unhealthy_s > self._replace_timeout_s:
            return f"The ranks could not be replaced within {self._replace_timeout_s:g} s."
        if still_s > self._stall_timeout_s:
            return f"The engine has work but ran no step for {self._stall_timeout_s:g} s."
        return None


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
