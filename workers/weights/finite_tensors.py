"""Rejects checkpoints with NaN or infinite weights.

Such a checkpoint would load, but none of its requests would succeed: every logit is NaN.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.finite_copy import are_finite, copy_finite
from pagedray.errors import CheckpointError
from workers.layers.formats.fp8_rows import FP8
from workers.layers.formats.mxfp4 import SCALE
from workers.weights.checkpoint import Checkpoint, device_of
from workers.weights.row_writer import as_numbers, quantize_to, write_rows

if TYPE_CHECKING:
    from workers.layers.weight import WeightShard

__all__ = ["FiniteTensors"]

_NAN_BITS = {FP8: 0x7F, SCALE: 0xFF}
"""The bits that are all set in NaN alone."""


class FiniteTensors:
    """The tensors of a checkpoint, each checked once when it is loaded, by any thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._sums: list[tuple[WeightShard, torch.Tensor]] = []
        """A number for each shard, on its device: finite if all values are."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""
        with device_of(shard):
            sums = [_copied(shard, *copy) for copy in self._checkpoint.copies(shard)]
        self._sums.append((shard, torch.stack(sums).sum()))

    def raise_if_not_finite(self) -> None:
        """Raise CheckpointError for the first tensor that has NaN or infinite values."""
        if not self._sums:
            return
        # A GPU is waited for only here, not after each tensor.
        are_finite = torch.stack([total for _, total in self._sums]).isfinite().tolist()
        for (shard, _), is_finite in zip(self._sums, are_finite, strict=True):
            # Large values may add up to infinity.
            if not is_finite and not _is_finite(shard):
                raise self._error(shard)

    def _error(self, shard: WeightShard) -> CheckpointError:
        path = self._checkpoint.path_of(shard.name)
        num_stored = num_converted = 0
        for stored in self._checkpoint.chunks(shard.name):
            chunk = as_numbers(stored, shard.target.dtype)
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


def _copied(shard: WeightShard, rows: slice, source: torch.Tensor) -> torch.Tensor:
    """Write `source` to these rows of the shard's target, unless it is there.

    Returns a number that is finite only if all values are.
    """
    target = shard.target[rows]
    if shard.scales is not None:
        scales = shard.scales[rows]
        quantize_to(target, scales, source)
        return scales.sum()
    if target.dtype in _NAN_BITS or not target.is_floating_point():
        write_rows(shard, rows, source)
        return _zero_if_finite(target)
    is_there = source.data_ptr() == target.data_ptr()
    is_finite = are_finite(target) if is_there else copy_finite(target, source)
    if is_finite is not None:
        return target.new_full((), 0.0 if is_finite else math.nan)
    if not is_there:
        target.copy_(source)
    # A sum is NaN or infinite if one of its values is, and is faster than `isfinite`.
    return target.sum()


def _zero_if_finite(values: torch.Tensor) -> torch.Tensor:
    """Return 0, or NaN if a value of 8 bits is NaN; these dtypes have no infinity."""
    zero = torch.zeros((), device=values.device)
    if values.dtype not in _NAN_BITS:
        return zero
    bits = _NAN_BITS[values.dtype]
    has_nan = (values.view(torch.uint8) & bits).eq(bits).any()
    return zero.masked_fill(has_nan, math.nan)


def _is_finite(shard: WeightShard) -> bool:
    values = shard.scales if shard.scales is not None else shard.target
    if values.dtype in _NAN_BITS:
        return bool(_zero_if_finite(values).isfinite())
    # With a NaN, both are NaN. A single pass without a temporary, unlike `isfinite`.
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _count(chunk: torch.Tensor) -> int:
    return int((~chunk.float().isfinite()).sum())


def _values(number: int) -> str:
    return "1 value that is" if number == 1 else f"{number} values that are"
