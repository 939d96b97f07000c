"""Products with a weight, `x @ weight.T + bias`: one class for each way of storing the weight.

Which way is fastest depends on the device, the type and the library that torch calls; the choice
is made once, when a layer is built, and by a fixed rule, so that an engine computes the same
numbers after every restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

import torch
from torch.nn import functional

from attention.kernels.cpu.packed_gemm import PackedGemm

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "DenseProduct",
    "PackedProduct",
    "PanelledProduct",
    "Product",
    "TwoWayProduct",
    "make_product",
    "padded_rows",
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

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        gate, other = self(x).chunk(2, dim=1)
        return functional.silu(gate).mul_(other)

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
        num_rows, _ = x.shape
        if num_spare := padded_rows(num_rows) - num_rows:
            x = functional.pad(x, (0, 0, 0, num_spare))
        return _linear(x, self.weight, self.bias, "none", [], "")[:num_rows]

    def finalize(self) -> None:
        """Pack the weight."""
        self.weight = torch.ops.mkldnn._reorder_linear_weight(
            self.weight.contiguous(), _PACKED_ROWS
        )


class PanelledProduct(PackedProduct):
    """The weight in panels for a kernel of our own; oneDNN's layout if that is not to be had.

    Two Zen 4 cores, all products of a model of 41 million weights, which their caches do not hold:
    float32, 1 row 4.0 ms and 6.4 packed, 8 rows 5.2 and 7.8, 32 rows 14.3 and 15.6; bfloat16,
    1 row 1.7 and 3.5, 8 rows 2.4 and 4.1, 32 rows 7.4 and 8.6. For hundreds of rows oneDNN is 2 to
    7% faster, which a gated product makes up for.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""
        return super().__call__(x) if self._panels is None else self._panels(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        return super().gated(x) if self._panels is None else self._panels.gated(x)

    def finalize(self) -> None:
        """Lay out the weight."""
        self._panels = PackedGemm.make(self.weight, self.bias)
        if self._panels is None:
            super().finalize()
        else:
            self.weight = self.weight.new_empty(0)


class TwoWayProduct(PackedProduct):
    """The weight in panels for a few rows, which memory limits, and packed for more.

    For CPUs on which oneDNN multiplies faster than our kernel: it has AMX, or AVX2 at its best.
    The price is a second copy of the weight, which is not paid for very large ones.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`."""
        if self._panels is not None and len(x) <= _FEW_ROWS:
            return self._panels(x)
        return super().__call__(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        if self._panels is not None and len(x) <= _FEW_ROWS:
            return self._panels.gated(x)
        return super().gated(x)

    def finalize(self) -> None:
        """Lay out the weight both ways."""
        self._panels = None
        if self.weight.nbytes <= _MOST_TWICE_BYTES:
            self._panels = PackedGemm.make(self.weight, self.bias)
        super().finalize()


# The layout is chosen for a row count; that for a batch is good for one row too, not conversely.
_PACKED_ROWS = 32
_FEW_ROWS = 16
_ROW_STEP = 16
_MANY_ROWS = 512
_MOST_TWICE_BYTES = 64 * 2**20
# The overload is named because finding it costs a microsecond a call.
_linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default


def padded_rows(num_rows: int) -> int:
    """Return how many rows are multiplied where so many are asked for.

    oneDNN keeps code of its own for each number of rows, about a megabyte with what it strews over
    the heap, and takes a while to make it.
    """
    if num_rows <= _FEW_ROWS:
        return num_rows
    step = _ROW_STEP if num_rows <= _MANY_ROWS else 2 * _ROW_STEP
    return -(-num_rows // step) * step


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
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if dtype == torch.float32:
        return PanelledProduct if has_avx512 else TwoWayProduct
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        has_amx = torch.cpu._is_amx_tile_supported()
        return PanelledProduct if has_avx512 and not has_amx else TwoWayProduct
    return DenseProduct
