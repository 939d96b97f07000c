"""Loads a rank's part of each tensor: from a checkpoint, or made-up numbers."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch

from workers.weights.checkpoint import Checkpoint
from workers.weights.dummy_tensors import DummyTensors
from workers.weights.finite_tensors import FiniteTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedray.config import EngineConfig
    from workers.layers.weight import Layer, WeightShard

__all__ = ["TensorSource", "fill_shards", "load_weights"]

_MAX_THREADS = 8


class TensorSource(Protocol):
    """A source of weights."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""


def load_weights(
    model: Layer,
    config: EngineConfig,
    report_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load a model and make it ready to run. Raises CheckpointError.

    `report_progress` is called with the number of tensors loaded, and of all tensors.
    """
    shards = list(model.weight_shards())
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_shards(shards, DummyTensors(config.load_seed), report_progress)
        else:
            with Checkpoint(config.model.folder, config.model.text_tensors) as checkpoint:
                checkpoint.check_tensors(
                    shards, has_spare_head=config.model.has_tied_embeddings or config.model.pools
                )
                tensors = FiniteTensors(checkpoint)
                num_threads = _num_threads(config)
                fill_shards(shards, tensors, report_progress, num_threads=num_threads)
                tensors.raise_if_not_finite()
        model.finalize()


def fill_shards(
    shards: Sequence[WeightShard],
    source: TensorSource,
    report_progress: Callable[[int, int], None] | None = None,
    *,
    num_threads: int = 1,
) -> None:
    """Load every shard from a source, with several threads if it allows that."""

    def fill(shard: WeightShard) -> None:
        # The mode is that of a thread.
        with torch.inference_mode():
            if shard.target.numel():
                source.fill_shard(shard)

    report = report_progress or _ignore_progress
    if num_threads == 1:
        for done, shard in enumerate(shards):
            report(done, len(shards))
            fill(shard)
    else:
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-load")
        try:
            for done, _ in enumerate(pool.map(fill, shards)):
                report(done, len(shards))
        finally:
            pool.shutdown(cancel_futures=True)
    report(len(shards), len(shards))


def _ignore_progress(done: int, total: int) -> None:
    pass


def _num_threads(config: EngineConfig) -> int:
    """Return how many threads load weights: several for a GPU, which is faster than one copies."""
    if config.parallel.device == "cpu":
        return 1
    share = len(os.sched_getaffinity(0)) // config.parallel.tensor_parallel_size
    return max(1, min(_MAX_THREADS, share))
