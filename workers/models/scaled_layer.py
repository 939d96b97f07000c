"""Attention or an MLP whose output is multiplied by a number, as in Granite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workers.layers.weight import CompositeLayer

if TYPE_CHECKING:
    import torch

    from workers.layers.experts import ExpertLayer
    from workers.layers.mlp import MLP
    from workers.layers.weight import Layer
    from workers.models.self_attention import DecoderSelfAttention

__all__ = ["ScaledLayer"]


class ScaledLayer(CompositeLayer):
    """Scales what a layer returns, which may be a rank's part of a sum, in place."""

    def __init__(self, layer: DecoderSelfAttention | MLP | ExpertLayer, scale: float) -> None:
        self._layer = layer
        self._scale = scale

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether the layer takes this number of rows as `QuantizedRows`, too."""
        return self._layer.takes_quantized(num_rows)

    def takes_unnormed(self, num_rows: int) -> bool:
        """Return whether the layer takes this number of rows as an `UnnormedRow`, too."""
        return self._layer.takes_unnormed(num_rows)

    # Any: the parameters of the layer, here and below.
    def add_or_return(self, stream: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """Return the scaled output: what the layer adds to the stream would not be scaled."""
        del stream
        return self(*arguments)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Return the scaled output."""
        return self._layer(*arguments).mul_(self._scale)

    def sublayers(self) -> tuple[Layer, ...]:
        return (self._layer,)
