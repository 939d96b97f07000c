"""Refuses checkpoints whose weights are NaN or infinite.

Such a checkpoint loads, but no request of it would succeed: every logit is NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from workers.layers.weight import WeightShard
    from workers.weights.checkpoint import Checkpoint

__all__ = ["FiniteTensors"]


class FiniteTensors:
    """The tensors of a checkpoint, each checked once when it is loaded, by any thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._extremes: list[tuple[WeightShard, torch.Tensor]] = []
        """The least and the greatest value of each shard, on its device."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""
        self._checkpoint.fill_shard(shard)
        # NaN is both, if there is one. One pass without a temporary, unlike `isfinite`.
        self._extremes.append((shard, torch.stack(torch.aminmax(shard.target))))

    def raise_if_not_finite(self) -> None:
        """Raise CheckpointError for the first tensor that has NaN or infinite values."""
        if not self._extremes:
            return
        # A GPU is waited for only here, not after each tensor.
        extremes = torch.stack([extremes for _, extremes in self._extremes])
        are_finite = extremes.isfinite().all(1).tolist()
        for (shard, _), is_finite in zip(self._extremes, are_finite, strict=True):
            if not is_finite:
                raise self._error(shard)

    def _error(self, shard: WeightShard) -> CheckpointError:
        path = self._checkpoint.path_of(shard.name)
        num_stored = num_converted = 0
        for chunk in self._checkpoint.chunks(shard.name):
            num_stored += _count(chunk)
            num_converted += _count(chunk.to(shard.target.dtype))
        if num_stored:
            return CheckpointError(
                f"{path}: tensor {shard.name} has {_values(num_stored)} NaN or infinite; "
                "download or export the checkpoint again."
            )
        dtype = str(shard.target.dtype).removeprefix("torch.")
        return CheckpointError(
            f"{path}: tensor {shard.name} has {_values(num_converted)} beyond the range of "
            f"{dtype}; use another --dtype."
        )


def _count(chunk: torch.Tensor) -> int:
    return int((~chunk.isfinite()).sum())


def _values(number: int) -> str:
    return "1 value that is" if number == 1 else f"{number} values that are"
