"""Dummy weights, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from workers.layers.formats.fp8_rows import FP8
from workers.weights.row_writer import write_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.layers.weight import WeightShard

__all__ = ["DummyTensors"]

_CHUNK_ELEMENTS = 2**22
_STANDARD_DEVIATION = 0.02


class DummyTensors:
    """Random numbers by seed, name and position alone, equal for any number of ranks.

    They are generated on the target's device, and differ between device types.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part: the shard's dummy value, or a normal distribution."""
        if shard.dummy is not None:
            shard.target.fill_(shard.dummy)
            return
        first, end, _ = shard.part[0].indices(shard.shape[0])
        for rows, chunk in self._chunks(shard, first, end):
            low, high = max(rows.start, first), min(rows.stop, end)
            part = chunk[low - rows.start : high - rows.start][(slice(None), *shard.part[1:])]
            write_rows(shard, slice(low - first, high - first), part)

    def _chunks(
        self, shard: WeightShard, first: int, end: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the first dimension and their numbers; all ranks chunk alike."""
        num_rows, row_shape = shard.shape[0], shard.shape[1:]
        height = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(row_shape).numel()))
        device = shard.target.device
        generator = torch.Generator(device)
        for index in range(first // height, -(-end // height)):
            rows = slice(index * height, min(num_rows, (index + 1) * height))
            generator.manual_seed(self._seed_of(shard.name, index))
            dtype = shard.target.dtype
            shape = (rows.stop - rows.start, *row_shape)
            if dtype.is_floating_point:
                # Torch has no random numbers in fp8.
                made = torch.bfloat16 if dtype == FP8 else dtype
                chunk = torch.empty(shape, dtype=made, device=device)
                yield rows, chunk.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
            else:
                chunk = torch.empty(shape, dtype=dtype, device=device)
                yield rows, chunk.random_(generator=generator)

    def _seed_of(self, name: str, index: int) -> int:
        digest = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
        return int.from_bytes(digest[:7])
