"""The head of a cross-encoder: the score of a pair of texts from its first hidden state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.linear import ColumnParallelLinear, Columns
from workers.layers.weight import CompositeLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pagedray.config import ModelConfig
    from workers.layers.weight import Layer

__all__ = ["ScoreHead"]


class ScoreHead(CompositeLayer):
    """A dense layer, tanh and a layer with one output, as in RoBERTa's classifier.

    Every rank holds and computes all of it.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        def linear(name: str, size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                [Columns(name=f"classifier.{name}", total=size, part=slice(0, size))],
                has_bias=True,
                dtype=dtype,
                device=device,
            )

        self._dense = linear("dense", config.hidden_size)
        self._output = linear("out_proj", 1)
        self._has_sigmoid = config.score_activation == "sigmoid"

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return `[num_texts, 1]` float32 for `[num_texts, hidden_size]`."""
        scores = self._output(self._dense(vectors).tanh()).float()
        return scores.sigmoid() if self._has_sigmoid else scores

    def sublayers(self) -> Iterator[Layer]:
        yield self._dense
        yield self._output
