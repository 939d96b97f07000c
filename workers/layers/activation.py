"""Activation functions of MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pagedray.config import Activation

__all__ = ["activation_function"]


def activation_function(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the elementwise function of this name."""
    return _FUNCTIONS[activation]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


_FUNCTIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}
