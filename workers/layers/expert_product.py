"""The weighted sum of the experts of each row, `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attention.kernels.expert_weights import ExpertWeights
from workers.layers.activation import clamped_gate
from workers.layers.linear_kernels.choice import make_linear_kernel

if TYPE_CHECKING:
    from workers.layers.expert_part import ExpertPart
    from workers.layers.formats.mxfp4 import Mxfp4Matrix
    from workers.layers.linear_kernels.linear_kernel import LinearKernel
    from workers.layers.router import Choice

__all__ = ["ExpertProduct", "GroupedExperts", "LinearExperts", "StackedExperts"]


class ExpertProduct(ABC):
    """The weights of a rank's experts, and the sum of their outputs.

    The result of a row does not depend on the other rows, except for rounding in a library.
    """

    @abstractmethod
    def __init__(self, part: ExpertPart) -> None:
        """Allocate the weights of a rank's part."""

    @abstractmethod
    def gate_up(self, expert: int) -> torch.Tensor | Mxfp4Matrix:
        """Return where the gate and up projection of the rank's expert of this index are loaded.

        The shape is `[2 * intermediate_size, hidden_size]`.
        """

    @abstractmethod
    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        """Return where their biases are loaded, `[2 * intermediate_size]`."""

    @abstractmethod
    def down(self, expert: int) -> torch.Tensor | Mxfp4Matrix:
        """Return where its down projection is loaded, `[hidden_size, intermediate_size]`."""

    @abstractmethod
    def down_bias(self, expert: int) -> torch.Tensor | None:
        """Return the target of the bias, `[hidden_size]`, if this rank adds the bias."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Return the weighted sums over the rank's experts, `[num_tokens, hidden_size]`."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The bytes of all weights and biases; must be read after `finalize`."""

    @abstractmethod
    def finalize(self) -> None:
        """Convert the loaded weights into the layout of the kernels."""


class LinearExperts(ExpertProduct):
    """Computes one expert after the other with the kernels of linear layers, for CPUs."""

    def __init__(self, part: ExpertPart) -> None:
        def kernels(shape: tuple[int, int], *, has_bias: bool) -> list[LinearKernel]:
            return [
                make_linear_kernel(*shape, has_bias=has_bias, dtype=part.dtype, device=part.device)
                for _ in part.experts
            ]

        self._experts = part.experts
        self._num_experts = part.config.num_experts
        self._gate = part.config.gate
        self._gate_up = kernels(part.gate_up_shape, has_bias=part.config.has_bias)
        self._down = kernels(part.down_shape, has_bias=part.has_output_bias)

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert].weight

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return self._gate_up[expert].bias

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert].weight

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return self._down[expert].bias

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        chosen = choice.experts.flatten()
        # Pairs of a token and an expert, sorted by expert.
        pairs = chosen.argsort(stable=True)
        tokens = pairs // choice.experts.shape[1]
        weights = choice.weights.flatten()[pairs, None]
        ends = chosen.bincount(minlength=self._num_experts).cumsum(0).tolist()
        starts = [0, *ends[:-1]]
        sums = x.new_zeros(x.shape, dtype=torch.float32)
        for index, expert in enumerate(self._experts):
            part = slice(starts[expert], ends[expert])
            if part.start == part.stop:
                continue
            inner = self._inner(index, x[tokens[part]])
            # A token's outputs are added in the order of experts, whatever the other tokens are.
            sums.index_add_(0, tokens[part], self._down[index](inner) * weights[part])
        return sums.to(x.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(kernel.num_bytes for kernel in (*self._gate_up, *self._down))

    def finalize(self) -> None:
        for kernel in (*self._gate_up, *self._down):
            kernel.finalize()

    def _inner(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return the input of an expert's down projection."""
        if self._gate is None:
            return self._gate_up[index].gated(rows)
        return clamped_gate(self._gate_up[index](rows), self._gate)


class StackedExperts(ExpertProduct):
    """Computes all experts at once with grouped GEMMs, for GPUs."""

    def __init__(self, part: ExpertPart) -> None:
        def biases(shape: tuple[int, int]) -> torch.Tensor:
            return torch.empty(len(part.experts), shape[0], dtype=part.dtype, device=part.device)

        self._first_expert = part.experts.start
        self._gate = part.config.gate
        self._gate_up_bias = biases(part.gate_up_shape) if part.config.has_bias else None
        self._down_bias = biases(part.down_shape) if part.has_output_bias else None
        self._stored: ExpertWeights | None = None
        """The weights that the kernels read; None before `finalize`."""
        self._allocate(part)

    @abstractmethod
    def _allocate(self, part: ExpertPart) -> None:
        """Allocate where the weights of both projections are loaded."""

    @property
    def num_bytes(self) -> int:
        assert self._stored is not None
        return self._stored.num_bytes

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return None if self._gate_up_bias is None else self._gate_up_bias[expert]

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return None if self._down_bias is None else self._down_bias[expert]

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.experts import expert_sums

        assert self._stored is not None
        return expert_sums(x, choice.experts, choice.weights, self._stored)

    def _store(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        *,
        gate_up_scales: torch.Tensor | None = None,
        down_scales: torch.Tensor | None = None,
    ) -> None:
        """Keep the weights in the layouts of the kernels."""
        self._stored = ExpertWeights(
            first_expert=self._first_expert,
            gate_up=gate_up,
            down=down,
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
            clamp=None if self._gate is None else (self._gate.alpha, self._gate.limit),
        )


class GroupedExperts(StackedExperts):
    """Experts with weights in the dtype of the rows."""

    def _allocate(self, part: ExpertPart) -> None:
        self._gate_up, self._down = (
            torch.empty(len(part.experts), *shape, dtype=part.dtype, device=part.device)
            for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert]

    def finalize(self) -> None:
        self._store(self._gate_up, self._down)
