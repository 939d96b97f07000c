"""Products with stored weights: the interface, and the product that dequantizes at loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from workers.layers.linear_choice import make_linear_kernel
from workers.layers.linear_kernel import LinearKernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import Activation
    from workers.layers.weight import MatrixPart, WeightShard

__all__ = ["DequantizedLinear", "QuantizedLinear", "StoredWeight"]


class QuantizedLinear(LinearKernel):
    """The product with a weight that is stored in a format of its own."""

    def __init__(
        self, stored: StoredWeight, bias: torch.Tensor | None, device: torch.device
    ) -> None:
        super().__init__(torch.empty(0, device=device), bias)
        self._stored = stored

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        yield from self._stored.weight_shards(source, rows)

    def reorder(self, order: torch.Tensor) -> None:
        self._stored.reorder(order)
        if self.bias is not None:
            self.bias.copy_(self.bias[order])

    def scale(self, factors: torch.Tensor, bias_factors: torch.Tensor) -> None:
        self._stored.scale(factors)
        if self.bias is not None:
            self.bias.mul_(bias_factors)

    def finalize(self) -> None:
        self._stored.finalize()


class DequantizedLinear(QuantizedLinear):
    """A weight that is dequantized when it is loaded, for CPUs; as large as a plain weight."""

    def __init__(
        self,
        stored: StoredWeight,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(stored, bias, device)
        self._dtype = dtype
        self._kernel: LinearKernel | None = None

    @property
    def weight_bytes(self) -> int:
        assert self._kernel is not None
        return self._kernel.weight_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._kernel is not None
        return self._kernel(x)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        assert self._kernel is not None
        return self._kernel.gated(x, activation)

    def finalize(self) -> None:
        super().finalize()
        weight = self._stored.dequantized(self._dtype)
        del self._stored
        kernel = make_linear_kernel(
            *weight.shape, has_bias=self.bias is not None, dtype=self._dtype, device=weight.device
        )
        kernel.weight.copy_(weight)
        if kernel.bias is not None and self.bias is not None:
            kernel.bias.copy_(self.bias)
        kernel.finalize()
        self._kernel = kernel


class StoredWeight(ABC):
    """A weight, `[out_size, in_size]`, in the tensors of its format."""

    @abstractmethod
    def weight_shards(self, source: MatrixPart, rows: slice) -> Iterator[WeightShard]:
        """Yield the checkpoint tensors that fill these rows of the weight."""

    @abstractmethod
    def reorder(self, order: torch.Tensor) -> None:
        """Reorder the loaded rows; must be called before `finalize`."""

    @abstractmethod
    def scale(self, factors: torch.Tensor) -> None:
        """Multiply the loaded rows, by `[out_size]` float32; must be called before `finalize`."""

    def finalize(self) -> None:  # noqa: B027  # Most tensors stay as they are.
        """Convert the loaded tensors into the form that products read."""

    @abstractmethod
    def dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, `[out_size, in_size]`; must be called after `finalize`."""
