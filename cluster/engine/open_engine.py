"""Opens an engine, for the Python API, `pagedray serve` and a Ray Serve replica alike."""

from __future__ import annotations

import logging
from bisect import bisect_right
from typing import TYPE_CHECKING

from cluster.engine.engine_loop import EngineLoop
from cluster.engine.local_executor import LocalExecutor
from pagedray.errors import StartupError
from pagedray.layout import num_held_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.util.placement_group import PlacementGroup

    from cluster.engine.engine_loop import EventSink
    from cluster.engine.executor import Executor, ReportProgress
    from pagedray.config import CacheSize, EngineConfig, SpeculationConfig

    MakeExecutor = Callable[[EngineConfig, ReportProgress, PlacementGroup | None], Executor]

__all__ = ["make_executor", "open_engine"]

logger = logging.getLogger(__name__)


def make_executor(
    config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None = None
) -> Executor:
    """Return the executor that `config` selects, with its ranks loaded.

    Ray places them in `placement`, or in a new placement group. Raises StartupError.
    """
    if config.parallel.executor == "local":
        return LocalExecutor(config, report_progress)
    # Ray is imported only if it is used.
    from cluster.engine.ray_executor import RayExecutor

    return RayExecutor(config, report_progress, placement=placement)


def open_engine(
    config: EngineConfig,
    sink: EventSink,
    report_progress: ReportProgress,
    *,
    placement: PlacementGroup | None = None,
    make_executor: MakeExecutor = make_executor,
) -> EngineLoop:
    """Return a running engine, which the caller closes. Raises StartupError."""
    executor = make_executor(config, report_progress, placement)
    try:
        config = config.with_limits(executor.cache_size.limits)
        if not config.model.pools:
            _check_context_fits(config, executor.cache_size)
            _check_disk_holds_block(config, executor.cache_size)
        if config.speculation is not None:
            _check_drafts_fit(config, config.speculation)
        engine = EngineLoop(config, executor, sink)
        engine.start_steps()
    except BaseException:
        executor.close()
        raise
    return engine


def _check_context_fits(config: EngineConfig, cache: CacheSize) -> None:
    """Raise StartupError if the device pool cannot hold one sequence of the maximum length."""
    length, block_size = config.max_model_len, config.cache.block_size

    def num_needed(num_tokens: int) -> int:
        # A sequence may start with its recurrent state in the pool.
        return cache.state_blocks + num_held_blocks(
            num_tokens,
            windows=cache.groups,
            block_size=block_size,
            step_tokens=config.max_num_batched_tokens,
        )

    if num_needed(length) <= cache.num_blocks:
        return
    most = bisect_right(range(length), cache.num_blocks, key=num_needed) - 1
    remedy = "or a higher --num-blocks"
    if config.cache.num_blocks is None:
        remedy = "a higher --memory-fraction, or more ranks (--tensor-parallel-size)"
    raise StartupError(
        f"A context of {length} tokens needs {num_needed(length)} KV blocks of {block_size} "
        f"tokens, but the cache has only {cache.num_blocks}; use --max-model-len {most} or less, "
        f"{remedy}."
    )


def _check_drafts_fit(config: EngineConfig, speculation: SpeculationConfig) -> None:
    """Raise StartupError if no step has room for as many drafts as a sequence may have."""
    if config.model.pools:
        logger.warning(
            "speculative_config has no effect on %s, which embeds or scores texts.",
            config.model.name,
        )
        return
    # A step computes the drafts of a sequence with its last token, each in a place of a sequence.
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        limit = getattr(config, name)
        if speculation.num_speculative_tokens >= limit:
            raise StartupError(
                f"num_speculative_tokens must be less than {name}, {limit}, not "
                f"{speculation.num_speculative_tokens}."
            )


def _check_disk_holds_block(config: EngineConfig, cache: CacheSize) -> None:
    """Raise StartupError if the disk is to keep blocks, but may not hold one of all ranks."""
    most_bytes = config.cache.disk_cache_bytes
    if most_bytes is not None and most_bytes < cache.block_bytes:
        raise StartupError(
            f"disk_cache_bytes must be at least the {cache.block_bytes} bytes of one KV block on "
            f"all ranks, not {most_bytes}."
        )
