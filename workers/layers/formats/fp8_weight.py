"""A weight in float8_e4m3fn with a scale for each output channel.

One scale for a whole tensor is that of all its channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.layers.formats.fp8_rows import FP8
from workers.layers.formats.stored_weight import StoredWeight
from workers.layers.weight import WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.weight_format import Fp8Format
    from workers.layers.weight import MatrixPart

__all__ = ["Fp8Weight"]


class Fp8Weight(StoredWeight):
    """Values and the scales of their rows."""

    def __init__(
        self, format: Fp8Format, out_size: int, in_size: int, *, device: torch.device
    ) -> None:
        self._format = format
        self.values = torch.empty(out_size, in_size, dtype=FP8, device=device)
        """`[out_size, in_size]` float8_e4m3fn."""
        self.scales = torch.empty(out_size, 1, device=device)
        """`[out_size, 1]` float32."""
        self.input_scale: torch.Tensor | None = None
        """`[1]` float32, the scale of all inputs, or None if each row has its own."""
        self._scalars: dict[tuple[str, int, int], torch.Tensor] = {}
        """The stored scales of whole tensors, by name and rows."""

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        is_made = self._format.is_made_at_load
        yield WeightShard(
            name=f"{source.name}.weight",
            shape=source.shape,
            part=source.part,
            target=self.values[rows],
            scales=self.scales[rows] if is_made else None,
        )
        if is_made:
            return
        if self._format.scales == "tensor":
            yield self._scalar(source, "weight_scale", rows)
        else:
            yield WeightShard(
                name=f"{source.name}.weight_scale",
                shape=(source.shape[0], 1),
                part=(source.part[0], slice(None)),
                target=self.scales[rows],
                dummy=1.0,
            )
        if self._format.has_input_scale:
            yield self._scalar(source, "input_scale", rows)

    def reorder(self, order: torch.Tensor) -> None:
        for tensor in (self.values.view(torch.uint8), self.scales):
            tensor.copy_(tensor[order])

    def finalize(self) -> None:
        for (name, first, end), scalar in self._scalars.items():
            if name == "weight_scale":
                self.scales[first:end] = scalar
        inputs = [scalar for (name, _, _), scalar in self._scalars.items() if name == "input_scale"]
        if inputs:
            # Layers with the same input are computed in one product.
            self.input_scale = torch.cat(inputs).amax().view(1)
        self._scalars.clear()

    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.float().mul_(self.scales).to(dtype)

    def _scalar(self, source: MatrixPart, name: str, rows: slice) -> WeightShard:
        first, end, _ = rows.indices(len(self.values))
        target = self._scalars.setdefault((name, first, end), self.scales.new_empty(1))
        return WeightShard(
            name=f"{source.name}.{name}",
            shape=(1,),
            part=(slice(None),),
            target=target,
            dummy=1.0,
        )
