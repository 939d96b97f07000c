"""Matrix-vector products, `x @ weight.T` for one row, at memory bandwidth.

A tensor core multiplies at least eight rows, and unpacking weights into its operands takes longer
than reading them, so `row_product.py` multiplies without tensor cores. A program loads its first
weights before the kernel that writes the row has ended. `normed_gemv.py` also computes the norm of
the row.

Milliseconds per token of Llama 3 8B on an H200, one request, with tensor cores and with these
kernels: fp8 4.78 and 2.63, int4 5.70 and 2.19 (`python -m bench.engine --workload latency`, with
`--quantization fp8` or `--shape llama-8b-int4`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.gated_activation import rounded_gate
from attention.kernels.triton.gemm.int4 import half_tile
from attention.kernels.triton.gemm.row_product import VECTOR_BYTES, add_row_product, weight_vectors
from attention.kernels.triton.kernel_launcher import can_depend, launch_options, wait_for_inputs
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["GemvTuning", "add_gemv", "default_gemv_tuning", "gemv", "gemv_gated"]

_LONG_ROW_BYTES = 8192
_LONG_INT4_ROW_BYTES = 4096
_MANY_COLUMNS = 4096
_FEW_COLUMNS = 528
"""With four columns each, as many programs would leave multiprocessors idle."""
_MAX_TILE_BYTES = 16384
_MAX_OUT_SIZE = 65536
"""For larger outputs, such as the vocabulary, cuBLAS also runs at memory bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvTuning:
    """How the work is tiled."""

    tile_columns: int
    """Output columns of a program, a power of two."""
    tile_bytes: int = 2048
    """Bytes of each column in an iteration, a power of two from 16."""
    num_warps: int = 4


def default_gemv_tuning(weight: torch.Tensor, *, is_gated: bool) -> GemvTuning | None:
    """Return the tuning for a weight, or None if cuBLAS is as fast, or vectors cannot be read.

    With a gate, a program reads the weights of two columns for each that it writes.
    """
    row_bytes = weight.shape[1] * weight.element_size()
    if row_bytes % VECTOR_BYTES or len(weight) > _MAX_OUT_SIZE:
        return None
    if weight.dtype == torch.uint8:
        return _int4_tuning(weight, row_bytes, is_gated=is_gated)
    if weight.dtype == torch.float32 and len(weight) <= _FEW_COLUMNS:
        # A program of a router has all of a column on its way before it waits for the row: a layer
        # of Nemotron-3-Nano takes 2 us less.
        tile_bytes = min(next_power_of_two(row_bytes), _MAX_TILE_BYTES)
        return GemvTuning(tile_columns=1, tile_bytes=tile_bytes)
    is_long = row_bytes >= _LONG_ROW_BYTES and not is_gated and weight.element_size() == 1
    return GemvTuning(tile_columns=8 if is_long else 4)


def _int4_tuning(weight: torch.Tensor, row_bytes: int, *, is_gated: bool) -> GemvTuning:
    """Return the best of 14 tunings for matrices of Llama 3 8B on an H200.

    A layer takes 42 us, or 48 with the tuning of other formats; at memory bandwidth it would be 28.
    """
    if is_gated:
        return GemvTuning(tile_columns=4, tile_bytes=512, num_warps=1)
    if row_bytes > _LONG_INT4_ROW_BYTES:
        return GemvTuning(tile_columns=4, num_warps=2)
    tile_columns = 8 if len(weight) > _MANY_COLUMNS else 4
    return GemvTuning(tile_columns=tile_columns, tile_bytes=1024, num_warps=2)


@triton.jit
def _gemv(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    out_size: tl.tensor,
    size: tl.constexpr,
    num_scales: tl.constexpr,
    half: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    is_gated: tl.constexpr,
    gate: tl.constexpr,
    kind: tl.constexpr,
    row: tl.constexpr,
    unpacks: tl.constexpr,
    is_dependent: tl.constexpr,
    tile_columns: tl.constexpr,
    tile: tl.constexpr,
    vector: tl.constexpr,
) -> None:
    """Write `tile_columns` output columns, or add to them if `adds` is set.

    Launched by `gemv`, `add_gemv` and `gemv_gated`; grid `(tiles of columns,)`. Pointers: x
    `[size]`; weight `[out_size, size]`, or twice as many rows if it is gated, in int4 `size / 2`
    bytes each; scales float32 `[out_size, num_scales]`, in int4 words of `scale_words`; bias and
    out `[out_size]`.
    """
    columns = tl.program_id(0) * tile_columns + tl.arange(0, tile_columns)
    # Columns past the end repeat earlier columns, and are not stored.
    read = tl.minimum(columns, out_size - 1)
    num_columns = out_size * 2 if is_gated else out_size
    sums = tl.zeros([tile_columns, tile // vector], tl.float32)
    other = tl.zeros([tile_columns, tile // vector], tl.float32)
    # No kernel writes weights, so the first weights can be loaded before the inputs are ready.
    values = weight_vectors(weight, read, 0, row, tile, vector)
    if is_gated:
        other_values = weight_vectors(weight, read + out_size, 0, row, tile, vector)
    wait_for_inputs(is_dependent)
    if adds:
        # No other program writes these. They are there before the product is.
        kept = tl.load(out + read).to(tl.float32)
    num_tiles: tl.constexpr = (row + tile - 1) // tile
    for index in range(1, num_tiles):
        next_values = weight_vectors(weight, read, index * tile, row, tile, vector)
        if is_gated:
            next_other = weight_vectors(weight, read + out_size, index * tile, row, tile, vector)
        sums = add_row_product(
            sums, values, x, scales, columns, num_columns, (index - 1) * tile, kind, size,
            num_scales, half, tile, vector, unpacks,
        )  # fmt: skip
        values = next_values
        if is_gated:
            other = add_row_product(
                other, other_values, x, scales, columns + out_size, num_columns, (index - 1) * tile,
                kind, size, num_scales, half, tile, vector, unpacks,
            )  # fmt: skip
            other_values = next_other
    sums = add_row_product(
        sums, values, x, scales, columns, num_columns, (num_tiles - 1) * tile, kind, size,
        num_scales, half, tile, vector, unpacks,
    )  # fmt: skip
    product = tl.sum(sums, axis=1)
    if is_gated:
        other = add_row_product(
            other, other_values, x, scales, columns + out_size, num_columns, (num_tiles - 1) * tile,
            kind, size, num_scales, half, tile, vector, unpacks,
        )  # fmt: skip
        other_product = tl.sum(other, axis=1)
    if kind == "fp8" and num_scales == 1:
        product *= tl.load(scales + read)
        if is_gated:
            other_product *= tl.load(scales + read + out_size)
    if has_bias:
        product += tl.load(bias + read).to(tl.float32)
    element_type = out.dtype.element_ty
    if is_gated:
        product = rounded_gate(product, other_product, gate, element_type)
    if adds:
        # Round first, as if the product had been stored before the addition.
        product = kept + product.to(element_type).to(tl.float32)
    tl.store(out + columns, product.to(element_type), mask=columns < out_size)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: GemvTuning,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`, `[1, out_size]`, for x of one row.

    `weight` is `[out_size, in_size]` and contiguous. A weight in float8_e4m3fn has `scales`,
    `[out_size, 1]` float32 or a scale for each block of inputs; an int4 weight comes from
    `packed_int4`, with `scale_words` as scales. The result of a weight in float32 is in float32.
    """
    dtype = torch.float32 if weight.dtype == torch.float32 else x.dtype
    out = torch.empty((1, len(weight)), dtype=dtype, device=x.device)
    _launch(x, weight, scales, bias, out, tuning, adds=False, gate=None)
    return out


def add_gemv(
    stream: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tuning: GemvTuning,
) -> None:
    """Add `gemv(x, ...)` to `stream`, `[1, out_size]`, in place."""
    _launch(x, weight, None, bias, stream, tuning, adds=True, gate=None)


def gemv_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: str,
    tuning: GemvTuning,
    *,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half` of `x @ weight.T`.

    Takes the arguments of `gemv`; the result is `[1, out_size / 2]`.
    """
    out = x.new_empty((1, len(weight) // 2))
    _launch(x, weight, scales, None, out, tuning, adds=False, gate=gate)
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tuning: GemvTuning,
    *,
    adds: bool,
    gate: str | None,
) -> None:
    num_rows, size = x.shape
    out_size = len(weight) if gate is None else len(weight) // 2
    assert num_rows == 1
    assert out.shape == (1, out_size)
    assert out.dtype == x.dtype or out.dtype == weight.dtype == torch.float32
    assert x.stride(1) == out.stride(1) == 1
    assert weight.is_contiguous()
    assert weight.shape[1] * weight.element_size() % VECTOR_BYTES == 0
    kind, num_scales = "plain", 1
    if weight.dtype == torch.float8_e4m3fn:
        assert scales is not None
        kind, num_scales = "fp8", scales.shape[1]
    elif weight.dtype == torch.uint8:
        assert scales is not None
        kind, num_scales = "int4", len(scales)
    words = weight if kind == "plain" else weight.view(torch.int32)
    _gemv[(triton.cdiv(out_size, tuning.tile_columns),)](
        x,
        words,
        weight if scales is None else scales,
        weight if bias is None else bias,
        out,
        out_size,
        size=size,
        num_scales=num_scales,
        half=half_tile(size, size // num_scales) if kind == "int4" else 1,
        has_bias=bias is not None,
        adds=adds,
        is_gated=gate is not None,
        gate=gate,
        kind=kind,
        row=words.shape[1],
        # The interpreter has no inline assembly.
        unpacks=x.is_cuda,
        is_dependent=can_depend(x.device),
        tile_columns=tuning.tile_columns,
        tile=tuning.tile_bytes // words.element_size(),
        vector=VECTOR_BYTES // words.element_size(),
        num_warps=tuning.num_warps,
        **launch_options(x.device),
    )
