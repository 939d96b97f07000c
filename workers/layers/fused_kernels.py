"""Chooses the fused kernels of norms, rotary embeddings and gates for a device.

Triton on GPUs, C on CPUs. Each function returns None where layers use torch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attention.kernels.cpu.token_rows import AddNorm, Gate, Rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attention.kernels.arguments import QuantizedRows
    from pagedray.model_config import Activation

__all__ = [
    "AddNormedKernel",
    "NormKernels",
    "RotateKernel",
    "add_normed_kernel",
    "gate_kernel",
    "head_norm_kernel",
    "norm_kernels",
    "quantized_gate_kernel",
    "rotate_kernel",
    "sigmoid_gate_kernel",
    "soft_cap_kernel",
]

AddNormKernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Adds the second tensor, if any, to the first in place, and returns the norm of the sum."""
AddPartsNormKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""As `AddNormKernel`, for the sum of the parts of `SplitKPartials`."""
GateKernel = Callable[[torch.Tensor], torch.Tensor]
"""Returns `f(first half of the columns) * second half`, `[num_tokens, columns / 2]`."""
QuantizedAddNormKernel = Callable[[torch.Tensor, torch.Tensor | None], "QuantizedRows"]
"""As `AddNormKernel`, and quantizes the norm."""
QuantizedGateKernel = Callable[[torch.Tensor], "QuantizedRows"]
"""As `GateKernel`, and quantizes the product."""
HeadNormKernel = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the norm of `[num_tokens, num_heads, head_size]`, scaled by `[num_heads, head_size]`."""
RotateKernel = Callable[[torch.Tensor, torch.Tensor], None]
"""Rotates `[num_tokens, num_heads, head_size]` in place, by positions `[num_tokens]` int64."""


@dataclass(frozen=True, slots=True, eq=False)
class NormKernels:
    """The kernels that add to the residual stream and norm the sum, where a device has them."""

    add: AddNormKernel | None = None
    add_parts: AddPartsNormKernel | None = None
    add_quantized: QuantizedAddNormKernel | None = None


def norm_kernels(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    is_centered: bool,
    overlaps: bool,
    dtype: torch.dtype,
) -> NormKernels:
    """Return the kernels of RMSNorm, or of LayerNorm if `is_centered`, for inputs of `dtype`.

    Whether a kernel `overlaps` with the kernel before it is for GPUs.
    """
    if weight.device.type == "cuda":
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton import norm_rope

        options: dict[str, Any] = {  # Any: mixed
            "weight": weight,
            "bias": bias,
            "eps": eps,
            "is_centered": is_centered,
            "overlaps": overlaps,
        }
        return NormKernels(
            partial(norm_rope.add_norm, **options),
            partial(norm_rope.add_parts_norm, **options),
            partial(norm_rope.quantized_add_norm, **options),
        )
    if is_centered or bias is not None or weight.dtype != dtype:
        return NormKernels()
    return NormKernels(AddNorm.make(weight, eps))


class AddNormedKernel(Protocol):
    """Adds the norm of an output to the stream, as `attention.kernels.triton.post_norm` says."""

    def __call__(
        self,
        stream: torch.Tensor,
        output: torch.Tensor,
        weights: Sequence[torch.Tensor],
        *,
        beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return a norm of the sum for each weight."""


def add_normed_kernel(
    weight: torch.Tensor, eps: float, *, overlaps: bool
) -> AddNormedKernel | None:
    """Return the kernel that adds the RMSNorm of an output, by this weight, to the stream."""
    if weight.device.type != "cuda":
        return None
    from attention.kernels.triton.post_norm import add_normed

    return partial(add_normed, norm=weight, eps=eps, overlaps=overlaps)


def head_norm_kernel(eps: float, device: torch.device) -> HeadNormKernel | None:
    """Return the kernel of RMSNorm of each head."""
    if device.type != "cuda":
        return None
    from attention.kernels.triton.norm_rope import norm_heads

    return partial(norm_heads, eps=eps)


def rotate_kernel(table: torch.Tensor, dtype: torch.dtype) -> RotateKernel | None:
    """Return the kernel that rotates heads of `dtype` by the angles of a table.

    `table` is `[num_positions, rotary_size]` float32: cosines, then sines, of each pair.
    """
    if table.device.type == "cuda":
        from attention.kernels.triton.norm_rope import rotate_heads

        return partial(rotate_heads, table=table)
    kernel = Rotate.make(table, dtype)
    if kernel is None:
        return None
    return lambda heads, positions: kernel(heads, positions, heads.shape[1])


@cache
def gate_kernel(activation: Activation, device: torch.device) -> GateKernel | None:
    """Return the kernel that applies the activation to the gate and multiplies."""
    if device.type == "cpu" and activation == "silu":
        return Gate.make(device)
    if device.type != "cuda" or activation == "relu" or activation == "relu2":
        return None
    from attention.kernels.triton.gated_activation import gated

    return partial(gated, kind=activation)


def sigmoid_gate_kernel(
    device: torch.device,
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the kernel that multiplies by the sigmoids of gates, in place."""
    if device.type != "cuda":
        return None
    from attention.kernels.triton.gated_activation import sigmoid_gated

    return sigmoid_gated


def quantized_gate_kernel(
    activation: Activation, device: torch.device
) -> QuantizedGateKernel | None:
    """Return the kernel of `gate_kernel` that quantizes the product."""
    if device.type != "cuda" or activation == "relu" or activation == "relu2":
        return None
    from attention.kernels.triton.gated_activation import quantized_gated

    return partial(quantized_gated, kind=activation)


def soft_cap_kernel(device: torch.device) -> Callable[[torch.Tensor, float], torch.Tensor] | None:
    """Return the kernel that caps logits, `[num_rows, size]`, and returns them in float32."""
    if device.type != "cuda":
        return None
    from attention.kernels.triton.gated_activation import soft_capped

    return soft_capped
