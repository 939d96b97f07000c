"""Loads a rank's part of each tensor: from a checkpoint, or dummy weights."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from pagedray.machine import num_usable_cores
from workers.weights.checkpoint import Checkpoint
from workers.weights.dummy_tensors import DummyTensors
from workers.weights.finite_tensors import FiniteTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagedray.config import EngineConfig
    from workers.layers.weight import Layer, WeightShard

__all__ = ["TensorSource", "fill_shards", "load_weights"]

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
# Of a tensor that one thread loads at a time, so that all threads have work until the end.
_PIECE_BYTES = 2**25


class TensorSource(Protocol):
    """A source of weights."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""


def load_weights(
    model: Layer,
    config: EngineConfig,
    report_progress: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Load a model and make it ready to run; return a digest of each file that has its tensors.

    `report_progress` is called with the number of tensors loaded, and of all tensors. Raises
    CheckpointError.
    """
    with torch.inference_mode():
        # Drop all other references to the weights, so that packing frees the originals.
        digests = _read_weights(list(model.weight_shards()), config, report_progress)
        model.finalize()
    return digests


def _read_weights(
    shards: Sequence[WeightShard],
    config: EngineConfig,
    report_progress: Callable[[int, int], None] | None,
) -> dict[str, str]:
    if config.load_format == "dummy":
        fill_shards(shards, DummyTensors(config.load_seed), report_progress)
        return {}
    started_s = time.perf_counter()
    with Checkpoint(config.model.folder, config.model.text_tensors) as checkpoint:
        checkpoint.check_tensors(
            shards, has_spare_head=config.model.has_tied_embeddings or config.model.pools
        )
        tensors = FiniteTensors(checkpoint)
        in_order = checkpoint.in_file_order(shards)
        checkpoint.read_ahead(in_order)
        fill_shards(in_order, tensors, report_progress, num_threads=_num_threads(config))
        tensors.raise_if_not_finite()
        # The data just read is in the page cache.
        digests = checkpoint.file_digests()
    gigabytes = sum(shard.target.nbytes for shard in shards) / 1e9
    duration_s = time.perf_counter() - started_s
    logger.info(
        "Loaded %.2f GB of weights in %.1f s, %.2f GB/s",
        gigabytes,
        duration_s,
        gigabytes / duration_s,
    )
    return digests


def fill_shards(
    shards: Sequence[WeightShard],
    source: TensorSource,
    report_progress: Callable[[int, int], None] | None = None,
    *,
    num_threads: int = 1,
) -> None:
    """Load every shard from a source, with several threads if it allows that."""

    def fill(piece: WeightShard) -> None:
        # The mode is that of a thread.
        with torch.inference_mode():
            if piece.target.numel():
                source.fill_shard(piece)

    report = report_progress or _ignore_progress
    if num_threads == 1:
        for done, shard in enumerate(shards):
            report(done, len(shards))
            fill(shard)
    else:
        pieces = [(piece, done) for done, shard in enumerate(shards) for piece in _pieces(shard)]
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-load")
        try:
            filled = pool.map(fill, [piece for piece, _ in pieces])
            for _, (_, done) in zip(filled, pieces, strict=True):
                report(done, len(shards))
        finally:
            pool.shutdown(cancel_futures=True)
    report(len(shards), len(shards))


def _pieces(shard: WeightShard) -> Iterator[WeightShard]:
    """Yield shards that together equal `shard`, cut along its first dimension if it is large."""
    if shard.target.nbytes <= _PIECE_BYTES:
        yield shard
        return
    num_rows = len(shard.target)
    height = max(1, num_rows * _PIECE_BYTES // shard.target.nbytes)
    start, _, _ = shard.part[0].indices(shard.shape[0])
    for first in range(0, num_rows, height):
        target = shard.target[first : first + height]
        rows = slice(start + first, start + first + len(target))
        scales = None if shard.scales is None else shard.scales[first : first + height]
        yield replace(shard, part=(rows, *shard.part[1:]), target=target, scales=scales)


def _ignore_progress(done: int, total: int) -> None:
    pass


def _num_threads(config: EngineConfig) -> int:
    """Return the number of threads that load weights; a single thread may be too slow."""
    if config.parallel.device == "cpu":
        return min(_MAX_THREADS, torch.get_num_threads())
    share = num_usable_cores() // config.parallel.tensor_parallel_size
    return max(1, min(_MAX_THREADS, share))
