"""Products with a weight that is packed into tiles of columns on the CPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch

__all__ = ["TiledProduct"]


class TiledProduct(ABC):
    """A weight, `[out_size, in_size]`, packed into tiles of columns.

    Every sum is taken in the same order: a row of the result depends neither on the other rows of
    the batch nor on the number of threads.
    """

    _tile: int
    """Columns of a tile."""

    def __init__(self, out_size: int, in_size: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the inputs."""
        self._out_size, self._in_size = out_size, in_size
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`; rows of x may be strided."""
        return self._product(x, self._out_size, is_gated=False)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        half = self._out_size // 2
        if half % self._tile == 0:
            return self._product(x, half, is_gated=True)
        gate, other = self(x).chunk(2, dim=1)
        return functional.silu(gate).mul_(other)

    @abstractmethod
    def _run(self, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> None:
        """Write the product, gated or not."""

    def _product(self, x: torch.Tensor, out_size: int, *, is_gated: bool) -> torch.Tensor:
        num_rows, in_size = x.shape
        assert x.dtype == self._dtype
        assert in_size == self._in_size
        assert x.stride(1) == 1
        out = x.new_empty((num_rows, out_size))
        self._run(x, out, is_gated=is_gated)
        return out
