"""The weights of experts as kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ExpertWeights"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of a rank's experts, all contiguous.

    With scales, both projections are in mxfp4, as `packed_mxfp4` returns them.
    """

    first_expert: int
    """The first expert of this rank; experts of other ranks add nothing."""
    gate_up: torch.Tensor
    """`[num_experts, 2 * inner_size, hidden_size]`."""
    down: torch.Tensor
    """`[num_experts, hidden_size, inner_size]`."""
    gate_up_scales: torch.Tensor | None = None
    """The exponents of blocks of 32 inputs, uint8 `[num_experts, hidden_size / 32, 2 *
    inner_size]`."""
    down_scales: torch.Tensor | None = None
    """The same, `[num_experts, inner_size / 32, hidden_size]`."""
    gate_up_bias: torch.Tensor | None = None
    """`[num_experts, 2 * inner_size]`."""
    down_bias: torch.Tensor | None = None
    """`[num_experts, hidden_size]`."""
    clamp: tuple[float, float] | None = None
    """The alpha and the limit of a `ClampedGate`; None for a SiLU gate."""

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        return len(self.gate_up)

    @property
    def inner_size(self) -> int:
        """Columns of each expert on this rank."""
        return self.gate_up.shape[1] // 2

    @property
    def is_mxfp4(self) -> bool:
        """Whether weights are in mxfp4, with scales."""
        return self.gate_up_scales is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights and biases."""
        tensors = (
            *(self.gate_up, self.gate_up_scales, self.gate_up_bias),
            *(self.down, self.down_scales, self.down_bias),
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)
