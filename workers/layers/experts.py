"""Experts in place of an MLP, sharded over the ranks as an MLP is.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.layers.expert_product import expert_product_class
from workers.layers.linear import columns_of
from workers.layers.router import Router
from workers.layers.weight import Layer, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.config import ExpertsConfig, TensorNames
    from workers.layers.mlp import MLP
    from workers.parallel.group import ParallelGroup

__all__ = ["ExpertLayer"]


class ExpertLayer(Layer):
    """A router and its experts: a rank has some columns of each, or some whole ones.

    One all-reduce adds what the ranks compute.
    Without `reduces`, the output is this rank's part of the sum.
    """

    def __init__(
        self,
        prefix: str,
        names: TensorNames,
        experts: ExpertsConfig,
        *,
        hidden_size: int,
        shared: MLP | None,
        reduces: bool,
        group: ParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shared` is an MLP that every token passes, whose output is this rank's part."""
        self._hidden_size = hidden_size
        self._config = experts
        self._group = group
        self._reduces = reduces
        self._shared = shared
        ours, part = slice(0, experts.num_experts), slice(0, experts.intermediate_size)
        if experts.is_expert_parallel:
            ours = part_of(experts.num_experts, group)
        else:
            part = part_of(experts.intermediate_size, group)
        self._experts = range(ours.start, ours.stop)
        self._part = part
        self._inputs = columns_of(
            [f"{prefix}.{name}" for name in names.expert_input],
            [(experts.intermediate_size, self._part)] * 2,
        )
        self._output_name = f"{prefix}.{names.expert_output}"
        self._router = Router(
            f"{prefix}.{names.router}", experts, hidden_size=hidden_size, dtype=dtype, device=device
        )
        self._product = expert_product_class(device)(
            experts=self._experts,
            num_experts=experts.num_experts,
            hidden_size=hidden_size,
            intermediate_size=self._part.stop - self._part.start,
            dtype=dtype,
            device=device,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        out = self._product(x, self._router(x))
        if self._shared is not None:
            out.add_(self._shared(x))
        return self._group.all_reduce(out) if self._reduces else out

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from self._router.weight_shards()
        for expert in range(self._config.num_experts):
            gate_up = down = None
            if expert in self._experts:
                index = expert - self._experts.start
                gate_up, down = self._product.gate_up(index), self._product.down(index)
            first = 0
            for columns in self._inputs:
                rows = slice(first, first + columns.size)
                yield self._shard(
                    columns.name,
                    expert,
                    (columns.total, self._hidden_size),
                    (columns.part, slice(None)),
                    gate_up[rows] if gate_up is not None else None,
                )
                first = rows.stop
            yield self._shard(
                self._output_name,
                expert,
                (self._hidden_size, self._config.intermediate_size),
                (slice(None), self._part),
                down,
            )
        if self._shared is not None:
            yield from self._shared.weight_shards()

    def _shard(
        self,
        name: str,
        expert: int,
        shape: tuple[int, int],
        part: tuple[slice, slice],
        target: torch.Tensor | None,
    ) -> WeightShard:
        """Return a matrix of an expert, by its name or as part of the stack of all experts.

        Without a target the rank has no part of it.
        """
        if target is None:
            part, target = (slice(0), slice(0)), torch.empty(0, 0)
        own_name = name.format(expert)
        if own_name != name:
            return WeightShard(name=own_name, shape=shape, part=part, target=target)
        return WeightShard(
            name=name,
            shape=(self._config.num_experts, *shape),
            part=(slice(expert, expert + 1), *part),
            target=target[None],
        )

    def finalize(self) -> None:
        self._router.finalize()
        self._product.finalize()
        if self._shared is not None:
            self._shared.finalize()
