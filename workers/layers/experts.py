"""Experts instead of an MLP, sharded over the ranks as an MLP is.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.rank_roofline import WeightWork
from workers.layers.expert_part import ExpertPart
from workers.layers.expert_tensors import ExpertTensors
from workers.layers.mxfp4_experts import make_expert_product
from workers.layers.router import Router
from workers.layers.weight import Layer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from pagedray.model_config import ExpertsConfig, TensorNames
    from workers.layers.mlp import MLP
    from workers.layers.weight import WeightShard
    from workers.parallel.group import ParallelGroup

__all__ = ["ExpertLayer"]


class ExpertLayer(Layer):
    """A router and its experts: a rank has some columns of each, or some whole ones.

    One all-reduce adds what the ranks compute.
    """

    def __init__(
        self,
        prefix: str,
        names: TensorNames,
        experts: ExpertsConfig,
        *,
        hidden_size: int,
        shared: MLP | None,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shared` is an MLP that every token passes."""
        self._num_experts = experts.num_experts
        self._num_chosen = experts.num_chosen
        self._hidden_size = hidden_size
        self._group = group
        self._shared = shared
        self._tensors = ExpertTensors(prefix, names, experts, hidden_size=hidden_size, group=group)
        self._router = Router(
            f"{prefix}.{names.router}", experts, hidden_size=hidden_size, dtype=dtype, device=device
        )
        self._product = make_expert_product(
            ExpertPart(
                config=experts,
                experts=self._tensors.experts,
                hidden_size=hidden_size,
                intermediate_size=self._tensors.intermediate_size,
                has_output_bias=self._tensors.has_output_bias,
                dtype=dtype,
                device=device,
            )
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        return self._group.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output."""
        out = self._product(x, self._router(x))
        if self._shared is not None:
            out.add_(self._shared.partial(x))
        return out

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from self._router.weight_shards()
        yield from self._tensors.weight_shards(self._product)
        if self._shared is not None:
            yield from self._shared.weight_shards()

    def weight_work(self) -> WeightWork:
        tensors = self._tensors
        # The ranks have as many experts each, or as much of each.
        part = len(tensors.experts) / self._num_experts
        size = self._hidden_size * tensors.intermediate_size
        work = self._router.weight_work() + WeightWork(
            expert_bytes=self._product.num_bytes,
            # Gate, up and down projection.
            row_flop=self._num_chosen * part * 3 * 2.0 * size,
        )
        return work if self._shared is None else work + self._shared.weight_work()

    def finalize(self) -> None:
        self._router.finalize()
        self._product.finalize()
        if self._shared is not None:
            self._shared.finalize()
