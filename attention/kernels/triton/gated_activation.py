"""Gates of MLPs and of heads, and soft caps.

The gate of an MLP is an activation of one half of the columns, times the other half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import triton
import triton.language as tl

from attention.kernels.triton.fp8_rows import empty_quantized, store_quantized
from attention.kernels.triton.kernel_launcher import (
    KernelLauncher,
    can_depend,
    launch_options,
    wait_for_inputs,
)
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import QuantizedRows

__all__ = ["Gate", "gated", "quantized_gated", "rounded_gate", "sigmoid_gated", "soft_capped"]

Gate = Literal["silu", "gelu", "gelu_tanh"]

_TILE = 1024


@triton.jit
def _logistic(x: tl.tensor) -> tl.tensor:
    """Return the logistic function of each element."""
    # Beyond this the exponential would overflow, and the quotient is zero anyway.
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def _activation(x: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Return the activation `kind`, a `Gate`, of each element, float32."""
    if kind == "silu":
        return x * _logistic(x)
    if kind == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    # (1 + tanh(u)) / 2 is the logistic function of 2 u.
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * _logistic(2.0 * inner)


@triton.jit
def rounded_gate(
    product: tl.tensor, other: tl.tensor, kind: tl.constexpr, element_type: tl.constexpr
) -> tl.tensor:
    """Return `activation(product) * other`, float32, of both as a GEMM would have rounded them."""
    product = product.to(element_type).to(tl.float32)
    return _activation(product, kind) * other.to(element_type).to(tl.float32)


@triton.jit
def _gated_product(
    row: tl.tensor, elements: tl.tensor, size: tl.constexpr, kind: tl.constexpr
) -> tl.tensor:
    """Return elements of the gated product of `row`, a pointer; zeros beyond the size."""
    is_element = elements < size
    gate = tl.load(row + elements, mask=is_element, other=0.0)
    other = tl.load(row + size + elements, mask=is_element, other=0.0)
    product = _activation(gate.to(tl.float32), kind) * other.to(tl.float32)
    return product.to(row.dtype.element_ty)


@triton.jit
def _gated(
    columns: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    size: tl.constexpr,
    kind: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write `tile` elements of the gated product of one row.

    Launched by `gated`; grid `(num_rows, tiles of a row)`. Pointers: columns
    `[num_rows, 2 * size]`, out `[num_rows, size]`.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * tile + tl.arange(0, tile)
    product = _gated_product(columns + row * row_stride, elements, size, kind)
    tl.store(out + row * size + elements, product, mask=elements < size)


_GATED = KernelLauncher(_gated)


def gated(columns: torch.Tensor, kind: Gate) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half`, `[num_rows, size]`."""
    num_rows, both = columns.shape
    size = both // 2
    assert columns.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=columns.dtype, device=columns.device)
    if num_rows:
        tile = min(_TILE, next_power_of_two(size))
        _GATED.launch(
            (num_rows, triton.cdiv(size, tile), 1),
            (columns, out),
            (columns.stride(0), size, kind, can_depend(columns.device), tile),
            num_warps=4,
            **launch_options(columns.device),
        )
    return out


@triton.jit
def _quantize_gated(
    columns: tl.tensor,
    out: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    size: tl.constexpr,
    kind: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the gated product of one row in fp8, and its scale.

    Launched by `quantized_gated`; grid `(num_rows,)`. Pointers: columns `[num_rows, 2 * size]`,
    out `[num_rows, size]`, scales `[num_rows]` float32.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.arange(0, tile)
    product = _gated_product(columns + row * row_stride, elements, size, kind)
    store_quantized(product.to(tl.float32), out, scales, row, elements, size)


_QUANTIZE_GATED = KernelLauncher(_quantize_gated)


def quantized_gated(columns: torch.Tensor, kind: Gate) -> QuantizedRows:
    """Compute `quantize_rows(gated(...))` by one kernel."""
    num_rows, both = columns.shape
    size = both // 2
    assert columns.stride(1) == 1
    rows = empty_quantized(num_rows, size, dtype=columns.dtype, device=columns.device)
    if num_rows:
        tile = next_power_of_two(size)
        _QUANTIZE_GATED.launch(
            (num_rows, 1, 1),
            (columns, rows.values, rows.scales),
            (columns.stride(0), size, kind, can_depend(columns.device), tile),
            num_warps=min(16, max(4, tile // 512)),
            **launch_options(columns.device),
        )
    return rows


@triton.jit
def _gate_by_sigmoid(
    x: tl.tensor,
    gate: tl.tensor,
    gate_stride: tl.tensor,
    size: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Multiply `tile` elements of one row by the sigmoids of their gates, in place.

    Launched by `sigmoid_gated`; grid `(num_rows, tiles of a row)`. Pointers: x and gate
    `[num_rows, size]`.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * tile + tl.arange(0, tile)
    is_element = elements < size
    x += row * size + elements
    values = tl.load(x, mask=is_element, other=0.0)
    gates = tl.load(gate + row * gate_stride + elements, mask=is_element, other=0.0)
    # Round as if the gates had been stored.
    gates = _logistic(gates.to(tl.float32)).to(values.dtype)
    tl.store(x, (values.to(tl.float32) * gates.to(tl.float32)).to(values.dtype), mask=is_element)


_GATE_BY_SIGMOID = KernelLauncher(_gate_by_sigmoid)


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return `x`, `[num_rows, size]`, after it was multiplied by `sigmoid(gate)` in place.

    Rows of gates may be strided.
    """
    num_rows, size = x.shape
    assert x.is_contiguous()
    assert gate.shape == x.shape
    assert gate.stride(1) == 1
    if num_rows:
        tile = min(_TILE, next_power_of_two(size))
        _GATE_BY_SIGMOID.launch(
            (num_rows, triton.cdiv(size, tile), 1),
            (x, gate),
            (gate.stride(0), size, can_depend(x.device), tile),
            num_warps=4,
            **launch_options(x.device),
        )
    return x


@triton.jit
def _soft_cap(
    logits: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    cap: tl.tensor,
    size: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write `tile` capped logits of one row.

    Launched by `soft_capped`; grid `(num_rows, tiles of a row)`. Pointers: logits
    `[num_rows, size]`, out the same in float32.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    elements = tl.program_id(1) * tile + tl.arange(0, tile)
    is_element = elements < size
    x = tl.load(logits + row * row_stride + elements, mask=is_element, other=0.0).to(tl.float32)
    # tanh from exp(-2 |x|), which cannot overflow.
    shrunk = tl.exp(tl.abs(x) / cap * -2.0)
    capped = (1.0 - shrunk) / (1.0 + shrunk) * tl.where(x < 0.0, -cap, cap)
    tl.store(out + row * size + elements, capped, mask=is_element)


_SOFT_CAP = KernelLauncher(_soft_cap)


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `cap * tanh(logits / cap)`, `[num_rows, size]` float32."""
    num_rows, size = logits.shape
    assert logits.stride(1) == 1
    out = torch.empty((num_rows, size), dtype=torch.float32, device=logits.device)
    if num_rows:
        _SOFT_CAP.launch(
            (num_rows, triton.cdiv(size, _TILE), 1),
            (logits, out),
            (logits.stride(0), float(cap), size, can_depend(logits.device), _TILE),
            num_warps=4,
            **launch_options(logits.device),
        )
    return out
