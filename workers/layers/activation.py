"""Activation functions of MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from workers.layers.fused_kernels import gate_kernel, soft_cap_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.model_config import Activation, ClampedGate

__all__ = ["activation_function", "clamped_gate", "gated_columns", "soft_capped"]


def activation_function(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the elementwise function of this name."""
    return _FUNCTIONS[activation]


def clamped_gate(columns: torch.Tensor, form: ClampedGate) -> torch.Tensor:
    """Return the gated first half of the columns times the second half plus 1.

    From `[num_rows, 2 * size]` to `[num_rows, size]`.
    """
    gate, up = columns.chunk(2, dim=1)
    gate = gate.clamp(max=form.limit)
    up = up.clamp(-form.limit, form.limit)
    return torch.sigmoid(form.alpha * gate).mul_(gate).mul_(up + 1.0)


def gated_columns(columns: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return `activation(first half of the columns) * second half`.

    From `[num_rows, 2 * size]` to `[num_rows, size]`; `columns` may change.
    """
    kernel = gate_kernel(activation, columns.device)
    if kernel is not None:
        return kernel(columns)
    gate, up = columns.chunk(2, dim=1)
    return activation_function(activation)(gate).mul_(up)


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Return `cap * tanh(logits / cap)`, float32, for `[num_rows, size]`."""
    kernel = soft_cap_kernel(logits.device)
    if kernel is not None:
        return kernel(logits, cap)
    return logits.float().div_(cap).tanh_().mul_(cap)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square_(),
}
