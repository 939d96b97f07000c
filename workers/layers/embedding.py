"""Token embedding and language model head, spread over the ranks by vocabulary.

The vocabulary is padded to a multiple of the ranks; rows of padding are zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.linear_kernels import product_class
from workers.layers.weight import WeightSlot, divided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.parallel.group import ParallelGroup

__all__ = ["ParallelHead", "VocabEmbedding"]


class VocabEmbedding:
    """Token ids to the residual stream."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._scale = float(torch.tensor(scale).to(dtype))
        self._group = group
        self._vocab = _Part(vocab_size, group)
        self.weight = torch.zeros(self._vocab.num_rows, hidden_size, dtype=dtype, device=device)
        """`[rows of this rank, hidden_size]`"""

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the residual stream of tokens, `[num_tokens]` int64."""
        rows = self._rows(token_ids)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield this rank's rows of the table."""
        yield self._vocab.slot(self._name, self.weight)

    def finalize(self) -> None:
        """Do nothing."""

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self._vocab.first
        is_elsewhere = (local < 0) | (local >= self._vocab.num_rows)
        rows = functional.embedding(local.masked_fill_(is_elsewhere, 0), self.weight)
        rows.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)
        return self._group.all_reduce(rows)


class ParallelHead:
    """Hidden states to logits; each rank computes those of its part of the vocabulary."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        soft_cap: float | None = None,
        group: ParallelGroup,
        tied_to: VocabEmbedding | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._vocab_size = vocab_size
        self._soft_cap = soft_cap
        self._group = group
        self._vocab = _Part(vocab_size, group)
        self._is_tied = tied_to is not None
        kind = product_class(dtype, device)
        if tied_to is not None:
            self._product = kind(tied_to.weight, None)
            return
        self._product = kind.empty(
            self._vocab.num_rows, hidden_size, has_bias=False, dtype=dtype, device=device
        )
        self._product.weight.zero_()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, `[num_rows, vocab_size]` float32, the same on every rank."""
        logits = self._group.all_gather_last(self._product(hidden))
        logits = logits.narrow(1, 0, self._vocab_size).float()
        if self._soft_cap is None:
            return logits
        return logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield this rank's rows, unless they are the embedding's."""
        if not self._is_tied:
            yield self._vocab.slot(self._name, self._product.weight)

    def finalize(self) -> None:
        """Bring the rows into the form that is multiplied with; on a GPU, tied ones stay one."""
        self._product.finalize()


class _Part:
    """The rows of the vocabulary that a rank holds."""

    def __init__(self, vocab_size: int, group: ParallelGroup) -> None:
        self._vocab_size = vocab_size
        self.num_rows = divided(vocab_size, group.size)
        self.first = group.rank * self.num_rows

    def slot(self, name: str, rows: torch.Tensor) -> WeightSlot:
        """Return the slot that fills these rows, padding excepted."""
        first = min(self.first, self._vocab_size)
        end = min(self.first + self.num_rows, self._vocab_size)
        return WeightSlot(
            name=name,
            shape=(self._vocab_size, rows.shape[1]),
            part=(slice(first, end), slice(None)),
            target=rows[: end - first],
        )
