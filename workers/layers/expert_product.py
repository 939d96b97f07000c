"""The product of rows with their experts: `down(silu(gate(x)) * up(x))` of each, weighted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from workers.layers.linear_kernels import make_linear_kernel

if TYPE_CHECKING:
    from workers.layers.router import Choice

__all__ = ["ExpertProduct", "GroupedExperts", "LinearExperts", "expert_product_class"]


class ExpertProduct(ABC):
    """The weights of a rank's experts, and the sum of their outputs.

    What a row becomes does not depend on the other rows, but for the rounding of a library.
    """

    @abstractmethod
    def __init__(
        self,
        *,
        experts: range,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`experts` are those of this rank, of `num_experts` on all ranks together."""

    @abstractmethod
    def gate_up(self, expert: int) -> torch.Tensor:
        """Return where the gate and up projection of the rank's expert of this index are loaded.

        The shape is `[2 * intermediate_size, hidden_size]`.
        """

    @abstractmethod
    def down(self, expert: int) -> torch.Tensor:
        """Return where its down projection is loaded, `[hidden_size, intermediate_size]`."""

    @abstractmethod
    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        """Return the weighted sums over the rank's experts, `[num_tokens, hidden_size]`."""

    def finalize(self) -> None:  # noqa: B027  # Stacked weights stay as they are.
        """Convert the loaded weights into the layout of the kernels."""


class LinearExperts(ExpertProduct):
    """One expert after the other, by the kernels of linear layers, for CPUs."""

    def __init__(
        self,
        *,
        experts: range,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._experts = experts
        self._num_experts = num_experts
        self._gate_up, self._down = (
            [
                make_linear_kernel(*shape, has_bias=False, dtype=dtype, device=device)
                for _ in experts
            ]
            for shape in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
        )

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert].weight

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert].weight

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        chosen = choice.experts.flatten()
        # Pairs of a token and an expert, by their experts.
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
            inner = self._gate_up[index].gated(x[tokens[part]])
            # A token adds its experts in their order, whatever the other tokens are.
            sums.index_add_(0, tokens[part], self._down[index](inner) * weights[part])
        return sums.to(x.dtype)

    def finalize(self) -> None:
        for kernel in (*self._gate_up, *self._down):
            kernel.finalize()


class GroupedExperts(ExpertProduct):
    """All experts at once, by kernels whose tiles have rows of one expert each, for GPUs."""

    def __init__(
        self,
        *,
        experts: range,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (len(experts), 2 * intermediate_size, hidden_size)
        self._first_expert = experts.start
        self._gate_up = torch.empty(shape, dtype=dtype, device=device)
        self._down = self._gate_up.new_empty((len(experts), hidden_size, intermediate_size))

    def gate_up(self, expert: int) -> torch.Tensor:
        return self._gate_up[expert]

    def down(self, expert: int) -> torch.Tensor:
        return self._down[expert]

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        # Triton is absent on machines without a GPU.
        from attention.kernels.triton.experts import expert_sums

        return expert_sums(
            x,
            choice.experts,
            choice.weights,
            self._gate_up,
            self._down,
            first_expert=self._first_expert,
        )


def expert_product_class(device: torch.device) -> type[ExpertProduct]:
    """Return the class for a device."""
    return GroupedExperts if device.type == "cuda" else LinearExperts
