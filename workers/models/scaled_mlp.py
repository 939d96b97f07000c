"""An MLP whose output is multiplied by a number, as in Granite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.weight import CompositeLayer

if TYPE_CHECKING:
    import torch

    from attention.kernels.quantized_rows import QuantizedRows
    from attention.kernels.unnormed_row import UnnormedRow
    from workers.layers.experts import ExpertLayer
    from workers.layers.mlp import MLP
    from workers.layers.weight import Layer

__all__ = ["ScaledMLP"]


class ScaledMLP(CompositeLayer):
    """Scales what an MLP or experts return, which may be a rank's part of a sum, in place."""

    def __init__(self, mlp: MLP | ExpertLayer, scale: float) -> None:
        self._mlp = mlp
        self._scale = scale

    def takes_quantized(self, num_rows: int) -> bool:
        """Return whether the MLP takes this number of rows as `QuantizedRows`, too."""
        return self._mlp.takes_quantized(num_rows)

    def takes_unnormed(self, num_rows: int) -> bool:
        """Return whether the MLP takes this number of rows as an `UnnormedRow`, too."""
        return self._mlp.takes_unnormed(num_rows)

    def add_or_return(
        self, stream: torch.Tensor, x: torch.Tensor | QuantizedRows | UnnormedRow
    ) -> torch.Tensor:
        """Return the scaled output: what the MLP adds to the stream would not be scaled."""
        del stream
        return self(x)

    def __call__(self, x: torch.Tensor | QuantizedRows | UnnormedRow) -> torch.Tensor:
        """Return the scaled output, `[num_tokens, hidden_size]`."""
        return self._mlp(x).mul_(self._scale)

    def sublayers(self) -> tuple[Layer, ...]:
        return (self._mlp,)
