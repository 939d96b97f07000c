"""The element type of matrix products on tensor cores."""

from __future__ import annotations

import torch
import triton.language as tl

__all__ = ["dot_type"]

_DOT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def dot_type(operand: torch.Tensor) -> tl.dtype:
    """Return the element type of matrix products with an operand, which is that of the operand.

    Triton's interpreter, which runs the kernels on the CPU, cannot multiply bfloat16.
    """
    widens = operand.dtype == torch.bfloat16 and not operand.is_cuda
    return tl.float32 if widens else _DOT_TYPES[operand.dtype]
