"""A weight of eight bits: numbers from -128 to 127, with a scale for each group of inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.errors import CheckpointError
from workers.layers.formats.quantized_linear import StoredWeight
from workers.layers.weight import MatrixPart, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.weight_format import Int8Format

__all__ = ["Int8Weight"]

_PER_WORD = 4
_SIGN = 0x80


class Int8Weight(StoredWeight):
    """A weight of eight bits; a scale of a whole tensor becomes that of each channel."""

    def __init__(
        self, format: Int8Format, out_size: int, in_size: int, *, device: torch.device
    ) -> None:
        self._format = format
        self.numbers = torch.empty(out_size, in_size, dtype=torch.int8, device=device)
        """`[out_size, in_size]` int8; a product takes and drops it."""
        self.group_size = format.group_size or in_size
        """Inputs that have a scale in common."""
        self.scales = torch.empty(out_size, in_size // self.group_size, device=device)
        """`[out_size, in_size / group_size]` float32."""
        self._loaded: dict[tuple[int, int], torch.Tensor] = {}
        """Scales of whole tensors, by their rows."""

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        out_size, in_size = source.shape
        out_part, in_part = source.part
        self._check_cut(source)
        if self._format.is_packed:
            yield WeightShard(
                name=f"{source.name}.weight_packed",
                shape=(out_size, in_size // _PER_WORD),
                part=(out_part, _divided(in_part, in_size, _PER_WORD)),
                target=self.numbers[rows].view(torch.int32),
            )
            # The shape is known from config.json.
            shape = torch.empty(2, dtype=torch.int64, device=self.numbers.device)
            yield WeightShard.whole(f"{source.name}.weight_shape", shape)
        else:
            yield source.shard(self.numbers[rows])
        name = f"{source.name}.weight_scale"
        if self._format.scales == "tensor":
            first, end, _ = rows.indices(len(self.numbers))
            scale = self._loaded.setdefault((first, end), self.scales.new_empty(1))
            yield WeightShard.whole(name, scale, dummy=0.01)
            return
        size = self._format.group_size
        yield WeightShard(
            name=name,
            shape=(out_size, 1 if size is None else in_size // size),
            part=(out_part, slice(0, 1) if size is None else _divided(in_part, in_size, size)),
            target=self.scales[rows],
            dummy=0.01,
        )

    def reorder(self, order: torch.Tensor) -> None:
        self._spread_scales()
        self.numbers.copy_(self.numbers[order])
        self.scales.copy_(self.scales[order])

    def scale(self, factors: torch.Tensor) -> None:
        self._spread_scales()
        self.scales.mul_(factors.unsqueeze(1))

    def finalize(self) -> None:
        self._spread_scales()
        if self._format.is_packed:
            # The first number is in the lowest bits.
            self.numbers.view(torch.uint8).bitwise_xor_(_SIGN)

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        groups = self.numbers.view(*self.scales.shape, self.group_size)
        return groups.float().mul_(self.scales.unsqueeze(2)).view_as(self.numbers).to(dtype)

    def _check_cut(self, source: MatrixPart) -> None:
        in_size = self.numbers.shape[1]
        step = self._format.in_step
        if in_size % step:
            raise CheckpointError(
                f"{source.name} has {in_size} inputs on each rank, but its int8 weights need a "
                f"multiple of {step}; use fewer ranks."
            )

    def _spread_scales(self) -> None:
        for (first, end), scale in self._loaded.items():
            self.scales[first:end] = scale
        self._loaded.clear()


def _divided(part: slice, size: int, step: int) -> slice:
    """Return the part of a dimension that is `step` times coarser."""
    first, end, _ = part.indices(size)
    return slice(first // step, end // step)
