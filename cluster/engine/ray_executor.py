"""Ranks as Ray actors in a placement group.

When a rank dies, `restart_ranks` starts a new rank in the same bundle, and joins it with the
remaining ranks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.engine.executor import Executor, Outage, RankHealth, ReportProgress
from cluster.engine.rank_monitor import StartLimit
from cluster.engine.rank_places import PoolMemories, RankPlaces, RecoveryLog, SpareRanks
from cluster.engine.ray_connection import RayConnection
from cluster.engine.ray_ranks import RayRanks
from pagedray.errors import DeviceError, StartupError, WorkerError
from pagedray.text import pluralize

if TYPE_CHECKING:
    from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
    from pagedray.config import EngineConfig
    from pagedray.rank_roofline import RankRoofline

__all__ = ["RayExecutor"]

logger = logging.getLogger(__name__)

_PLACEMENT_TIMEOUT_S = 15.0
_OUTAGE_TIMEOUT_S = 2.0
"""Time within which the end of GCS or the raylet is noticed."""


class RayExecutor(Executor):
    """A tensor-parallel group of Ray actors in one placement group."""

    def __init__(
        self,
        config: EngineConfig,
        report_progress: ReportProgress,
        *,
        placement: PlacementGroup | None = None,
    ) -> None:
        """Start the ranks in the last bundles of `placement`, or in a new placement group.

        `close` removes only a new placement group.
        """
        self._config = config
        self._report_progress = report_progress
        self._placement = placement
        self._owns_placement = placement is None
        self._spares = SpareRanks(config.parallel.num_spare_ranks)
        self._start_limit = StartLimit()
        self._memories = None
        if config.cache.has_cpu_cache and not config.model.pools:
            self._memories = PoolMemories(config.parallel.tensor_parallel_size)
        self._ranks: RayRanks | None = None
        self._connection: RayConnection | None = None
        try:
            self._connection = RayConnection(config, report_progress)
            if self._placement is None:
                self._placement = _placement(config)
            self._ranks = self._new_epoch()
            self._cache_size, self._kernels = self._ranks.start_ranks()
            if self._memories is not None:
                # All are new, as the scheduler's map is.
                self._memories.take_kept()
            self._fill_spares(self._ranks.places)
        except WorkerError as error:
            reason = self._reason_of(error)
            self.close()
            raise StartupError(reason) from error
        except BaseException:
            self.close()
            raise

    def poll_ranks(self) -> tuple[int, list[DiskReport]]:
        return self._live_ranks().poll_ranks()

    @property
    def outage(self) -> Outage | None:
        return None if self._connection is None else self._connection.health.outage

    def submit_plan(self, plan: StepPlan) -> None:
        self._live_ranks().send_to_ranks(plan)

    def send_masks(self, masks: StepMasks) -> None:
        self._live_ranks().send_to_ranks(masks)

    def collect_output(self) -> StepOutput:
        return self._live_ranks().collect_output()

    def measure_rooflines(self) -> list[RankRoofline]:
        return self._live_ranks().measure_rooflines()

    def observe_ranks(self, now_s: float) -> RankHealth:
        # The thread that runs steps may replace them meanwhile.
        ranks = self._ranks
        return ranks.observe_ranks(now_s) if ranks is not None else RankHealth(is_busy=True)

    def restart_ranks(self) -> bool:
        assert self._connection is not None
        with self._connection.disk_reserve.released():
            try:
                return self._connection.health.run_unless_out(self._restart_ranks)
            except OSError as error:
                # Such as too many open files, which may end.
                raise WorkerError(f"Ranks could not be started: {error}.") from error

    def close(self) -> None:
        if self._connection is None:
            self._close()
        else:
            self._connection.health.end(self._close)

    def _restart_ranks(self) -> bool:
        recovery = RecoveryLog()
        old, self._ranks = self._ranks, None
        if old is None and self._memories is not None:
            # The last attempt failed, perhaps because the pools keep the memory that it needs.
            self._memories.renew()
        try:
            new = self._new_epoch()
        except BaseException:
            if old is not None:
                old.close()
            raise
        # After a failed attempt no rank is left.
        survivors = {} if old is None else old.end_epoch()
        recovery.end_phase("left")
        # The scheduler relies on the same number of blocks, but free GPU memory varies.
        new.replace_ranks(survivors, self._cache_size, recovery)
        self._ranks = new
        self._fill_spares(new.places)
        return self._memories is not None and self._memories.take_kept()

    def _close(self) -> None:
        self._end_ranks()
        if self._memories is not None:
            self._memories.close()
        self._spares.close()
        self._remove_placement()
        if self._connection is not None:
            self._connection.close()
        self._placement = self._connection = None

    def _report_unless_out(self, what: str, fraction: float) -> None:
        """Report progress. Raises StartupError if Ray has ended, since ranks would not start."""
        outage = self.outage
        if outage is not None and outage.is_final:
            raise StartupError(outage.reason)
        self._report_progress(what, fraction)

    def _reason_of(self, error: WorkerError) -> str:
        """Return why ranks could not start; Ray does not say so if it was the end of Ray itself."""
        assert self._connection is not None
        outage = self._connection.health.wait_for_outage(_OUTAGE_TIMEOUT_S)
        return str(error) if outage is None else outage.reason

    def _remove_placement(self) -> None:
        """Remove the placement group; during an outage, Ray removes it with its job."""
        placement, connection = self._placement, self._connection
        if placement is None or not self._owns_placement:
            return
        # A placement group of our own is made with the connection.
        assert connection is not None
        if connection.health.outage is not None:
            return
        try:
            # If GCS ends, the call of Ray waits for minutes.
            connection.health.run_unless_out(lambda: remove_placement_group(placement))
        except StartupError as error:
            logger.debug("The placement group was not removed: %s", error)

    def _new_epoch(self) -> RayRanks:
        assert self._placement is not None
        try:
            places = RankPlaces(self._config, self._placement)
        except RayError as error:
            raise WorkerError(f"Could not look up the nodes of the ranks: {error}") from error
        return RayRanks(
            self._config,
            places,
            self._report_unless_out,
            spares=self._spares,
            start_limit=self._start_limit,
            memories=self._memories,
        )

    def _fill_spares(self, places: RankPlaces) -> None:
        try:
            self._spares.fill(places)
        except RayError as error:
            # Without a spare, a replacement takes longer.
            logger.warning("No spare rank could be started: %s", error)

    def _live_ranks(self) -> RayRanks:
        if self._ranks is None:
            raise WorkerError("The ranks have ended.")
        return self._ranks

    def _end_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


def _placement(config: EngineConfig) -> PlacementGroup:
    num_ranks = config.parallel.tensor_parallel_size
    bundle = {"CPU": 1.0}
    if config.parallel.device == "cuda":
        bundle["GPU"] = 1.0
    strategy = config.parallel.placement_strategy
    group: PlacementGroup = placement_group([bundle] * num_ranks, strategy=strategy)
    if not group.wait(_PLACEMENT_TIMEOUT_S):
        remove_placement_group(group)
        wanted = f"{pluralize(num_ranks, 'rank')} of {bundle}"
        if strategy != "STRICT_PACK":
            raise DeviceError(
                f"The Ray cluster has no free resources for {wanted} with placement strategy "
                f"{strategy}."
            )
        raise DeviceError(
            f"No node of the Ray cluster has free resources for {wanted}; use "
            "--placement-strategy PACK to allow several nodes."
        )
    return group
