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
    from workers.layers.weight import Layer, WeightSlot

__all__ = ["TensorSource", "fill_slots", "load_weights"]


class TensorSource(Protocol):
    """Where weights come from."""

    def fill(self, slot: WeightSlot) -> None:
        """Write this rank's part of a tensor to the slot's target, in the target's type."""


def load_weights(
    model: Layer,
    config: EngineConfig,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill a model and make it ready to run, telling (tensors done, tensors in all) as it goes.

    Raises CheckpointError.
    """
    slots = list(model.slots())
    with torch.inference_mode():
        if config.load_format == "dummy":
            fill_slots(slots, DummyTensors(config.load_seed), progress)
        else:
            with Checkpoint(config.model.folder) as checkpoint:
                checkpoint.check(slots, is_head_tied=config.model.has_tied_embeddings)
                fill_slots(slots, checkpoint, progress)
        model.finalize()


def fill_slots(
    slots: Sequence[WeightSlot],
    source: TensorSource,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill every slot from a source."""
    for done, slot in enumerate(slots):
        if progress is not None:
            progress(done, len(slots))
        if slot.target.numel():
            source.fill(slot)
    if progress is not None:
        progress(len(slots), len(slots))
