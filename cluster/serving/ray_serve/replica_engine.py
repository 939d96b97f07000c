"""The engine and servicer inside the process of a Ray Serve replica.

It owns the placement of ranks, startup and shutdown. It does not know the frontends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ray.util.placement_group import get_current_placement_group

from cluster.engine.engine_options import engine_config
from cluster.engine.frozen_heap import freeze_heap
from cluster.engine.open_engine import open_engine
from cluster.serving.auth.authenticator import Authenticator
from cluster.serving.auth.tenant import ANONYMOUS
from cluster.serving.call_options import CallOptions
from cluster.serving.engine_client import EngineClient
from cluster.serving.model_name import with_served_names
from cluster.serving.ray_serve.autoscaling import ReplicaLoad
from cluster.serving.ray_serve.progress import ProgressWatch
from cluster.serving.servicer import Servicer
from cluster.serving.telemetry.log_lines import logging_to
from cluster.serving.telemetry.tracing import otlp_tracer
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import EngineError, StartupError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from cluster.engine.controller import Controller
    from cluster.engine.embedder import Embedder
    from cluster.engine.open_engine import MakeExecutor
    from cluster.serving.ray_serve.options import ServeArguments
    from pagedray.config import EngineConfig

__all__ = ["ReplicaEngine"]

logger = logging.getLogger(__name__)

_REPLACE_TIMEOUT_S = 900.0
"""Includes loading the weights of new ranks."""
_CLOSE_GRACE_S = 2.0


class ReplicaEngine:
    """A servicer, its controller or embedder, and their ranks."""

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
        self._engine: Controller | Embedder | None = None
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
        return ReplicaLoad.from_loads(self.servicer.loads(ANONYMOUS), self.config.cache.block_size)

    def routing_stats(self) -> dict[str, float]:
        """Return the load by which routers choose among replicas, and when it was measured."""
        num_slots = self.servicer.loads(ANONYMOUS).num_blocks * self.config.cache.block_size
        return {
            "load": self.current_load().tokens_in_flight / max(num_slots, 1),
            "reported_s": time.monotonic(),
        }

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
