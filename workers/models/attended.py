"""The tokens of a step between the attention of a layer and the rest of that layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Attended"]


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What the rest of a layer computes its output from, each token by itself."""

    residual: torch.Tensor
    """The residual stream before the layer's output is added, `[num_tokens, hidden_size]`."""
    heads: torch.Tensor
    """The attention of this rank's heads, `[num_tokens, num_heads * head_size]`."""
    normed: torch.Tensor | None = None
    """What an MLP beside attention reads, `[num_tokens, hidden_size]`; None if the MLP follows."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Attended:
        """Return what a function returns for each of the tensors."""
        normed = self.normed
        return Attended(
            function(self.residual),
            function(self.heads),
            None if normed is None else function(normed),
        )

    def select(self, indices: torch.Tensor) -> Attended:
        """Return copies of some tokens; `indices` is `[num_selected]` int64 on their device."""
        return self.map(lambda rows: rows.index_select(0, indices))

    def select_beside(self, indices: torch.Tensor) -> Attended:
        """Return what `select` does if `heads` are already those of the selected tokens."""
        normed = self.normed
        return Attended(
            self.residual.index_select(0, indices),
            self.heads,
            None if normed is None else normed.index_select(0, indices),
        )

    def write(self, out: Attended) -> None:
        """Copy the tokens to the first ones of `out`."""
        num_tokens = len(self.residual)
        out.residual[:num_tokens].copy_(self.residual)
        out.heads[:num_tokens].copy_(self.heads)
        if self.normed is not None:
            assert out.normed is not None
            out.normed[:num_tokens].copy_(self.normed)
