"""Loads a rank's part of each tensor: from a checkpoint, or made-up numbers."""

from __future__ import annotations

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
            with Checkpoint(config.model.folder) as checkpoint:
                checkpoint.check_tensors(shards, is_head_tied=config.model.has_tied_embeddings)
                tensors = FiniteTensors(checkpoint)
                fill_shards(shards, tensors, report_progress)
                tensors.raise_if_not_finite()
        model.finalize()


def fill_shards(
    shards: Sequence[WeightShard],
    source: TensorSource,
    report_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load every shard from a source."""
    for done, shard in enumerate(shards):
        if report_progress is not None:
            report_progress(done, len(shards))
        if shard.target.numel():
            source.fill_shard(shard)
    if report_progress is not None:
        report_progress(len(shards), len(shards))
