"""A weight in float8_e4m3fn.

Each output channel has a scale, or a scale for each block of inputs. Scales of whole tensors, and
of blocks of several output channels, apply to all their channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from workers.layers.formats.quantized_linear import StoredWeight
from workers.layers.weight import MatrixPart, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.weight_format import Fp8Format

__all__ = ["FP8", "Fp8Weight", "quantized_rows"]

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest value."""


class Fp8Weight(StoredWeight):
    """A weight in fp8: its values, and the scales of their rows."""

    def __init__(
        self, format: Fp8Format, out_size: int, in_size: int, *, device: torch.device
    ) -> None:
        self._format = format
        self.values = torch.empty(out_size, in_size, dtype=FP8, device=device)
        """`[out_size, in_size]` float8_e4m3fn."""
        self.depth = format.block[1] if format.scales == "block" else in_size
        """Inputs that have a scale in common."""
        self.scales = torch.empty(out_size, -(-in_size // self.depth), device=device)
        """`[out_size, in_size / depth]` float32, rounded up."""
        self.input_scale: torch.Tensor | None = None
        """`[1]` float32, the scale of all inputs, or None if they get their own in each step."""
        self._loaded: dict[tuple[Literal["weight", "input"], int, int], torch.Tensor] = {}
        """Scales as they are stored, by kind and rows."""
        self._first_row: dict[int, int] = {}
        """The place of a first row in its block, by row."""

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        is_made = self._format.is_made_at_load
        yield source.shard(self.values[rows], scales=self.scales[rows] if is_made else None)
        if is_made:
            return
        name = f"{source.name}.{self._format.scale_name}"
        first, end, _ = rows.indices(len(self.values))
        if self._format.scales == "tensor":
            scale = self._loaded.setdefault(("weight", first, end), self._new(1))
            yield WeightShard.whole(name, scale, dummy=1.0)
        elif self._format.scales == "channel":
            yield WeightShard(
                name=name,
                shape=(source.shape[0], 1),
                part=(source.part[0], slice(None)),
                target=self.scales[rows],
                dummy=1.0,
            )
        else:
            yield self._block_scales(name, source, first, end)
        if self._format.has_input_scale:
            scale = self._loaded.setdefault(("input", first, end), self._new(1))
            yield WeightShard.whole(f"{source.name}.input_scale", scale, dummy=1.0)

    def reorder(self, order: torch.Tensor) -> None:
        self._spread_scales()
        for tensor in (self.values.view(torch.uint8), self.scales):
            tensor.copy_(tensor[order])

    def scale(self, factors: torch.Tensor) -> None:
        self._spread_scales()
        self.scales.mul_(factors.unsqueeze(1))

    def finalize(self) -> None:
        self._spread_scales()
        inputs = [scale for (of, _, _), scale in self._loaded.items() if of == "input"]
        if inputs:
            # Layers with the same input are computed in one product.
            self.input_scale = torch.cat(inputs).amax().view(1)
        self._loaded.clear()

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(self.depth, dim=1)[:, : self.values.shape[1]]
        return self.values.float().mul_(scales).to(dtype)

    def _block_scales(self, name: str, source: MatrixPart, first: int, end: int) -> WeightShard:
        """Return the shard of the scales of all blocks that rows from `first` to `end` are in."""
        height, depth = self._format.block
        out_part, in_part = source.part
        low, high, _ = out_part.indices(source.shape[0])
        left, _, _ = in_part.indices(source.shape[1])
        assert left % depth == 0
        blocks = slice(low // height, -(-high // height))
        columns = slice(left // depth, left // depth + self.scales.shape[1])
        target = self._loaded.setdefault(
            ("weight", first, end), self._new(blocks.stop - blocks.start, self.scales.shape[1])
        )
        self._first_row[first] = low % height
        return WeightShard(
            name=name,
            shape=(-(-source.shape[0] // height), -(-source.shape[1] // depth)),
            part=(blocks, columns),
            target=target,
            dummy=1.0,
        )

    def _spread_scales(self) -> None:
        """Write the loaded scales of tensors and blocks to the scales of their rows."""
        for key in [key for key in self._loaded if key[0] == "weight"]:
            _, first, end = key
            scales = self._loaded.pop(key)
            if self._format.scales == "block":
                scales = scales.repeat_interleave(self._format.block[0], dim=0)
                scales = scales[self._first_row[first] :][: end - first]
            self.scales[first:end] = scales

    def _new(self, *shape: int) -> torch.Tensor:
        return self.scales.new_empty(shape)


def quantized_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in float8_e4m3fn and their scales, `[num_rows, 1]` float32.

    The largest magnitude of a row is mapped to the largest value. Finite rows have finite scales.
    """
    exact = rows.float()
    scales = exact.abs().amax(1, keepdim=True).div_(FP8_MAX)
    # A row of zeros may have any scale but 0.
    scales.masked_fill_(scales == 0.0, 1.0)
    return exact.div(scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales
