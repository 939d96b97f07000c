"""Opens an engine, for the Python API, `pagedray serve` and a Ray Serve replica alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.engine.controller import Controller
from cluster.engine.embedder import Embedder
from cluster.engine.local_executor import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.util.placement_group import PlacementGroup

    from cluster.engine.controller import EventSink
    from cluster.engine.executor import Executor, ReportProgress
    from pagedray.config import EngineConfig

    MakeExecutor = Callable[[EngineConfig, ReportProgress, PlacementGroup | None], Executor]

__all__ = ["make_executor", "open_engine"]


def make_executor(
    config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None = None
) -> Executor:
    """Return the executor that `config` selects, with its ranks loaded.

    Ray places them in `placement`, or in a new placement group. Raises StartupError.
    """
    if config.parallel.executor == "local":
        return LocalExecutor(config, report_progress)
    # Ray is imported only if it is used.
    from cluster.engine.ranks.ray_executor import RayExecutor

    return RayExecutor(config, report_progress, placement=placement)


def open_engine(
    config: EngineConfig,
    sink: EventSink,
    report_progress: ReportProgress,
    *,
    placement: PlacementGroup | None = None,
    make_executor: MakeExecutor = make_executor,
) -> Controller | Embedder:
    """Return a running engine: a Controller, or an Embedder if the model makes embeddings.

    The caller closes it. Raises StartupError.
    """
    executor = make_executor(config, report_progress, placement)
    try:
        engine: Controller | Embedder
        if config.model.pools:
            engine = Embedder(config, executor)
        else:
            engine = Controller(config, executor, sink)
        engine.start_steps()
    except BaseException:
        executor.close()
        raise
    return engine
