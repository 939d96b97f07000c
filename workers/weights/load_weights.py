"""Weights into a rank's parameters, slice by slice: from a checkpoint, or made up.

A rank reads only its own part of each tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from workers.weights.checkpoint import Checkpoint
from workers.weights.dummy_tensors import DummyTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedray.config import EngineConfig
    from workers.layers.weight import Layer, WeightShard

__all__ = ["TensorSource", "fill_shards", "load_weights"]


class TensorSource(Protocol):
    """Where weights come from."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, in the target's type."""


def load_weights(
    model: Layer,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a model and make it ready to run, telling (tensors done, tensors in all) as it goes.

    Raises CheckpointError.
    """
    shards = list(model.weight_shards())
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_shards(shards, DummyTensors(config.load_seed), progress)
        else:
            with Checkpoint(config.model.folder) as checkpoint:
                checkpoint.check_tensors(shards, is_head_tied=config.model.has_tied_embeddings)
                fill_shards(shards, checkpoint, progress)
        model.finalize()


def fill_shards(
    shards: Sequence[WeightShard],
    source: TensorSource,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill every shard from a source."""
    for done, shard in enumerate(shards):
        if progress is not None:
            progress(done, len(shards))
        if shard.target.numel():
            source.fill_shard(shard)
    if progress is not None:
        progress(len(shards), len(shards))
