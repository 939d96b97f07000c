"""Root-mean-square norms: of the residual stream, and of the heads of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from attention.kernels.token_rows import AddNorm
from workers.layers.weight import WeightSlot

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ResidualNorm", "RowNorm"]


class ResidualNorm:
    """The norm of the residual stream, alone or with what is added to the stream before."""

    def __init__(
        self, name: str, size: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = name
        self._size = size
        self._eps = eps
        self._weight = torch.empty(size, dtype=dtype, device=device)
        self._kernel = AddNorm.make(self._weight, eps)

    def __call__(self, stream: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add to the stream, in place, and return its norm, `[num_tokens, hidden_size]`."""
        if self._kernel is not None:
            return self._kernel(stream, delta)
        if delta is not None:
            stream.add_(delta)
        return functional.rms_norm(stream, (self._size,), self._weight, self._eps)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weight."""
        yield WeightSlot(
            name=self._name, shape=(self._size,), part=(slice(None),), target=self._weight
        )

    def finalize(self) -> None:
        """Do nothing."""


class RowNorm:
    """The norm of each head of queries and keys, with a weight for each of the two."""

    def __init__(
        self,
        query_name: str,
        key_name: str,
        head_size: int,
        eps: float,
        *,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._names = (query_name, key_name)
        self._head_size = head_size
        self._eps = eps
        self._num_heads = num_heads
        self._weights = torch.empty(2, head_size, dtype=dtype, device=device)
        self._repeats = torch.tensor([num_heads, num_kv_heads], device=device)
        self._weight = torch.empty(0)

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the norm of `[num_tokens, num_heads + num_kv_heads, head_size]`."""
        return functional.rms_norm(heads, (self._head_size,), None, self._eps).mul_(self._weight)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield both weights."""
        for name, target in zip(self._names, self._weights, strict=True):
            yield WeightSlot(
                name=name, shape=(self._head_size,), part=(slice(None),), target=target
            )

    def finalize(self) -> None:
        """Repeat the weights, a row for each head."""
        self._weight = self._weights.repeat_interleave(self._repeats, dim=0)
