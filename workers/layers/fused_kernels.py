"""Which kernel computes norms, rotations and gates of token rows on a device; torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.token_rows import AddNorm, Rotate

if TYPE_CHECKING:
    from pagedray.config import Activation

__all__ = [
    "AddNormKernel",
    "GateKernel",
    "HeadNormKernel",
    "RotateKernel",
    "add_norm_kernel",
    "gate_kernel",
    "head_norm_kernel",
    "rotate_kernel",
]

AddNormKernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Adds to rows in place, if told to, and returns their norm."""
GateKernel = Callable[[torch.Tensor], torch.Tensor]
"""Returns `f(first half of the columns) * second half`."""
HeadNormKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the norm of `[num_tokens, num_heads, head_size]` for a weight of each head."""
RotateKernel = Callable[[torch.Tensor, torch.Tensor], None]
"""Turns `[num_tokens, num_heads, head_size]` in place by their positions."""


def add_norm_kernel(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centred: bool,
    dtype: torch.dtype,
) -> AddNormKernel | None:
    """Return the kernel of a norm of rows of this type."""
    if weight.device.type == "cuda":
        # Triton is imported where there is a GPU to compile for.
        from attention.kernels.triton.token_rows import add_norm

        return partial(add_norm, weight=weight, bias=bias, eps=eps, is_centred=is_centred)
    if is_centred or bias is not None or weight.dtype != dtype:
        return None
    return AddNorm.make(weight, eps)


def head_norm_kernel(eps: float, device: torch.device) -> HeadNormKernel | None:
    """Return the kernel of the norm of each head."""
    if device.type != "cuda":
        return None
    from attention.kernels.triton.token_rows import norm_heads

    return partial(norm_heads, eps=eps)


def rotate_kernel(table: torch.Tensor, dtype: torch.dtype) -> RotateKernel | None:
    """Return the kernel that turns heads of this type by the turns in a table.

    `table` is `[num_positions, head_size]` float32: cosines, then sines, of each pair.
    """
    if table.device.type == "cuda":
        from attention.kernels.triton.token_rows import rotate_heads

        return partial(rotate_heads, table=table)
    kernel = Rotate.make(table, dtype)
    if kernel is None:
        return None
    return lambda heads, positions: kernel(heads, positions, heads.shape[1])


def gate_kernel(activation: Activation, device: torch.device) -> GateKernel | None:
    """Return the kernel of a gate."""
    if device.type != "cuda":
        return None
    from attention.kernels.triton.token_rows import gated

    return partial(gated, kind=activation)
