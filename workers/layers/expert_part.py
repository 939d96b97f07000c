"""The part of the experts of a layer that one rank holds: whole experts, or some columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedray.model_config import ExpertsConfig

__all__ = ["ExpertPart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """Some columns of every expert, or some whole experts."""

    config: ExpertsConfig
    """Of all ranks together."""
    experts: range
    """The experts of this rank."""
    hidden_size: int
    intermediate_size: int
    """Of each expert on this rank."""
    has_output_bias: bool
    """Whether this rank adds the biases of outputs."""
    dtype: torch.dtype
    """Of the rows that are multiplied."""
    device: torch.device

    @property
    def gate_up_shape(self) -> tuple[int, int]:
        """The outputs and inputs of an expert's gate and up projection."""
        return 2 * self.intermediate_size, self.hidden_size

    @property
    def down_shape(self) -> tuple[int, int]:
        """The outputs and inputs of its down projection."""
        return self.hidden_size, self.intermediate_size
