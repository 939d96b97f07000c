"""The names of experts, which a checkpoint may store one by one or as stacks of all of a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = ["with_stored_experts"]


def with_stored_experts(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the names of the stacks, if the checkpoint has them.

    Raises CheckpointError.
    """
    model = config.model
    stacked = model.stacked_names
    if stacked is None or config.load_format == "dummy":
        return config
    layers = [layer for layer in range(model.num_layers) if model.experts_of(layer) is not None]
    names = [f"{stacked.decoder_layer.format(layer)}.{stacked.expert_output}" for layer in layers]
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        if not any(name in checkpoint for name in names):
            return config
    return replace(config, model=replace(model, names=stacked, stacked_names=None))
