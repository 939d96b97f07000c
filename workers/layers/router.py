"""Chooses the experts of each token, and their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from workers.layers.linear_kernels.choice import make_linear_kernel
from workers.layers.weight import Layer, WeightShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ExpertsConfig
    from pagedray.rank_roofline import WeightWork

__all__ = ["Choice", "Router"]


class Choice(NamedTuple):
    """The experts of some tokens."""

    experts: torch.Tensor
    """Their indices, `[num_tokens, num_chosen]` int64, or int32 on a GPU."""
    weights: torch.Tensor
    """The weights of their outputs, `[num_tokens, num_chosen]` float32."""


class Router(Layer):
    """Chooses the experts of the highest softmax; all ranks compute it, with the same result."""

    def __init__(
        self,
        name: str,
        experts: ExpertsConfig,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._name = name
        self._shape = (experts.num_experts, hidden_size)
        self._num_chosen = experts.num_chosen
        self._is_renormalized = experts.is_renormalized
        self._kernel = make_linear_kernel(
            *self._shape, has_bias=experts.has_bias, dtype=dtype, device=device
        )

    def __call__(self, x: torch.Tensor) -> Choice:
        """Return the experts of each of `[num_tokens, hidden_size]`."""
        logits = self._kernel(x)
        if logits.is_cuda:
            # Triton is absent on machines without a GPU.
            from attention.kernels.triton.experts import choose_experts

            return Choice(
                *choose_experts(logits, self._num_chosen, is_renormalized=self._is_renormalized)
            )
        probabilities = logits.softmax(1, dtype=torch.float32)
        weights, experts = probabilities.topk(self._num_chosen, dim=1)
        if self._is_renormalized:
            weights = weights / weights.sum(1, keepdim=True)
        return Choice(experts, weights)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard(
            name=f"{self._name}.weight",
            shape=self._shape,
            part=(slice(None), slice(None)),
            target=self._kernel.weight,
        )
        if self._kernel.bias is not None:
            yield WeightShard(
                name=f"{self._name}.bias",
                shape=self._shape[:1],
                part=(slice(None),),
                target=self._kernel.bias,
            )

    def finalize(self) -> None:
        self._kernel.finalize()

    def weight_work(self) -> WeightWork:
        return self._kernel.work(*self._shape)
