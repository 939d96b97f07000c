"""Products with a weight, `x @ weight.T + bias`: one class for each way of storing the weight.

Which way is fastest depends on the device, the type and the library that torch calls; the choice
is made once, when a layer is built, and by a fixed rule, so that an engine computes the same
numbers after every restart.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DenseProduct",
    "PackedProduct",
    "Product",
    "TwoWayProduct",
    "make_product",
    "product_class",
]


class Product(ABC):
    """A weight and perhaps a bias, and how to multiply by them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        """`[out_size, in_size]`; to be filled before `finalize`, and perhaps gone after it."""
        self.bias = bias

    @classmethod
    def empty(
        cls,
        out_size: int,
        in_size: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Return a product of these sizes, yet to be filled."""
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
        return cls(weight, bias)

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""

    @abstractmethod
    def finalize(self) -> None:
        """Bring the weight into the form that is multiplied with."""


class DenseProduct(Product):
    """The weight as it comes: for GPUs, and wherever nothing better is known."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""
        return functional.linear(x, self.weight, self.bias)

    def finalize(self) -> None:
        """Do nothing."""


class PackedProduct(Product):
    """The weight in oneDNN's own layout, twice as fast as plain for bfloat16 at any row count."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""
        return _linear(x, self.weight, self.bias, "none", [], "")

    def finalize(self) -> None:
        """Pack the weight."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(
            self.weight.contiguous(), _PACKED_ROWS
        )


class TwoWayProduct(PackedProduct):
    """The weight as it comes for a row or two, packed for more: float32 through MKL.

    A forward pass of eight 512-wide layers takes 4.5 ms for one row and 11.5 for eight as it comes,
    6.3 and 9.4 packed (two Sapphire Rapids cores, weights not in their caches).
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""
        if len(x) <= _MOST_PLAIN_ROWS:
            return functional.linear(x, self._plain, self.bias)
        return super().__call__(x)

    def finalize(self) -> None:
        """Pack the weight, and keep it too."""
        self._plain = self.weight
        super().finalize()


# The layout is chosen for a row count; that for a batch is good for one row too, not conversely.
_PACKED_ROWS = 32
_MOST_PLAIN_ROWS = 2
# The overload is named because finding it costs a microsecond a call.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


def make_product(
    out_size: int, in_size: int, *, has_bias: bool, dtype: torch.dtype, device: torch.device
) -> Product:
    """Return the fastest product of these sizes for this device and type."""
    kind = product_class(dtype, device)
    return kind.empty(out_size, in_size, has_bias=has_bias, dtype=dtype, device=device)


def product_class(dtype: torch.dtype, device: torch.device) -> type[Product]:
    """Return which class of product is fastest for this device and type."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return DenseProduct
    if dtype == torch.float32:
        # Without the wide registers, which MKL uses on Intel's processors only, oneDNN always wins.
        is_mkl_fast = torch.backends.mkl.is_available() and _is_intel()
        return TwoWayProduct if is_mkl_fast else PackedProduct
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedProduct
    return DenseProduct


@functools.cache
def _is_intel() -> bool:
    path = Path("/proc/cpuinfo")
    return path.exists() and "GenuineIntel" in path.read_text(encoding="utf-8", errors="replace")
