"""The residual stream without a norm, for layers that norm their outputs only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.kernels.split_rows import SplitRows
from workers.layers.weight import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from workers.layers.weight import WeightShard
    from workers.parallel.group import ParallelGroup

__all__ = ["StreamSum"]


class StreamSum(Layer):
    """Adds to the residual stream as a `ResidualNorm` does, and returns the stream itself."""

    def __init__(self, sums_over: ParallelGroup | None) -> None:
        """With `sums_over`, what is added is this rank's part of a sum over the group."""
        self._sums_over = sums_over

    def __call__(
        self, stream: torch.Tensor, delta: torch.Tensor | SplitRows | None = None
    ) -> torch.Tensor:
        """Add `delta` to the stream, in place; all are `[num_tokens, hidden_size]`."""
        if delta is None:
            return stream
        if isinstance(delta, SplitRows):
            delta = delta.whole(stream.dtype)
        return stream.add_(delta if self._sums_over is None else self._sums_over.all_reduce(delta))

    def quantized(
        self, stream: torch.Tensor, delta: torch.Tensor | SplitRows | None
    ) -> torch.Tensor:
        """As the call: without a norm, nothing is gained by quantizing here."""
        return self(stream, delta)

    def unnormed(
        self, stream: torch.Tensor, delta: torch.Tensor | SplitRows | None
    ) -> torch.Tensor:
        """As the call: there is no norm to leave to the reader."""
        return self(stream, delta)

    def weight_shards(self) -> Iterator[WeightShard]:
        return iter(())
