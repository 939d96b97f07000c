"""Experts instead of an MLP, sharded over the ranks as an MLP is.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.rank_roofline import WeightWork
from pagedray.weight_format import MXFP4_BLOCK_SIZE
from workers.layers.expert_product import (
    ExpertPart,
    ExpertProduct,
    Router,
    make_expert_product,
)
from workers.layers.formats.mxfp4 import BLOCK_BYTES, Mxfp4Matrix
from workers.layers.weight import Layer, Placement, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ExpertsConfig, TensorNames
    from workers.layers.mlp import MLP
    from workers.parallel.group import ParallelGroup

__all__ = ["ExpertLayer"]

_ALL = slice(None)


class ExpertLayer(Layer):
    """A router and its experts: a rank has some columns of each, or some whole ones.

    One all-reduce adds what the ranks compute.
    """

    def __init__(
        self,
        prefix: str,
        names: TensorNames,
        experts: ExpertsConfig,
        place: Placement,
        *,
        hidden_size: int,
        shared: MLP | None,
    ) -> None:
        """`shared` is an MLP that every token passes."""
        self._num_experts = experts.num_experts
        self._num_chosen = experts.num_chosen
        self._hidden_size = hidden_size
        self._group = place.group
        self._shared = shared
        self._tensors = ExpertTensors(
            prefix, names, experts, hidden_size=hidden_size, group=place.group
        )
        factors = None if names.expert_scales is None else f"{prefix}.{names.expert_scales}"
        self._router = Router(
            f"{prefix}.{names.router}", factors, experts, place, hidden_size=hidden_size
        )
        self._product = make_expert_product(
            ExpertPart(
                config=experts,
                experts=self._tensors.experts,
                hidden_size=hidden_size,
                intermediate_size=self._tensors.intermediate_size,
                has_output_bias=self._tensors.has_output_bias,
                dtype=place.dtype,
                device=place.device,
            )
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        return self._group.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """Return this rank's part of the output. The router reads its own input, if it has one."""
        out = self._product(x, self._router(x if router_input is None else router_input))
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


class ExpertTensors:
    """The tensors of a rank's experts: some columns of each expert, or some whole experts.

    Experts are stored one by one, with their index in the name, or as stacks of all.
    """

    def __init__(
        self,
        prefix: str,
        names: TensorNames,
        config: ExpertsConfig,
        *,
        hidden_size: int,
        group: ParallelGroup,
    ) -> None:
        self._prefix = prefix
        self._names = names
        self._config = config
        self._hidden_size = hidden_size
        ours, part = slice(0, config.num_experts), slice(0, config.intermediate_size)
        if config.is_expert_parallel:
            ours = part_of(config.num_experts, group)
        else:
            part = part_of(config.intermediate_size, group)
        self.experts = range(ours.start, ours.stop)
        """The experts of this rank."""
        self.intermediate_size = part.stop - part.start
        """Of each expert on this rank."""
        # The outputs of all ranks for an expert are summed, so only one rank adds the bias.
        self.has_output_bias = config.has_bias and (config.is_expert_parallel or group.rank == 0)
        """Whether this rank adds the biases of outputs."""
        self._part = part

    def weight_shards(self, product: ExpertProduct) -> Iterator[WeightShard]:
        """Yield the part of each tensor of all experts, to be loaded to the product's experts."""
        for expert in range(self._config.num_experts):
            yield from self._input_shards(expert, product)
            yield from self._output_shards(expert, product)

    def _input_shards(self, expert: int, product: ExpertProduct) -> Iterator[WeightShard]:
        size, hidden_size = self.intermediate_size, self._hidden_size
        index = self._index_of(expert)
        for number, (name, total, columns) in enumerate(self._input_columns()):
            rows = slice(number * size, (number + 1) * size)
            target = None if index is None else product.gate_up(index)[rows]
            yield from self._matrix(name, expert, (total, hidden_size), (columns, _ALL), target)
            if self._config.has_bias:
                name = f"{self._prefix}.{self._names.expert_input_bias}"
                biases = None if index is None else product.gate_up_bias(index)
                target = None if biases is None else biases[rows]
                yield self._part_of_stack(name, expert, (total,), (columns,), target)

    def _output_shards(self, expert: int, product: ExpertProduct) -> Iterator[WeightShard]:
        index = self._index_of(expert)
        yield from self._matrix(
            f"{self._prefix}.{self._names.expert_output}",
            expert,
            (self._hidden_size, self._config.intermediate_size),
            (_ALL, self._part),
            None if index is None else product.down(index),
        )
        if self._config.has_bias:
            name = f"{self._prefix}.{self._names.expert_output_bias}"
            target = None if index is None else product.down_bias(index)
            yield self._part_of_stack(name, expert, (self._hidden_size,), (_ALL,), target)

    def _index_of(self, expert: int) -> int | None:
        """Return the index of an expert on this rank, or None."""
        return expert - self.experts.start if expert in self.experts else None

    def _input_columns(self) -> Iterator[tuple[str, int, slice]]:
        """Yield the name, the columns on all ranks and this rank's, of gate and up projection."""
        size, part = self._config.intermediate_size, self._part
        names = [f"{self._prefix}.{name}" for name in self._names.expert_input]
        if len(names) == 2:
            yield from ((name, size, part) for name in names)
            return
        for number in range(2):
            columns = slice(number * size + part.start, number * size + part.stop)
            if self._names.is_expert_input_interleaved:
                columns = slice(2 * part.start + number, 2 * part.stop, 2)
            yield names[0], 2 * size, columns

    def _matrix(
        self,
        name: str,
        expert: int,
        shape: tuple[int, int],
        part: tuple[slice, slice],
        target: torch.Tensor | Mxfp4Matrix | None,
    ) -> Iterator[WeightShard]:
        """Yield the tensors of `[out_size, in_size]`; without a target the rank has no part."""
        if self._config.is_mxfp4:
            assert not isinstance(target, torch.Tensor)
            yield from self._mxfp4_matrix(name, expert, shape, part, target)
            return
        assert not isinstance(target, Mxfp4Matrix)
        own_name = name.format(expert)
        if own_name == name:
            if self._names.are_experts_transposed:
                shape, part = (shape[1], shape[0]), (part[1], part[0])
                target = None if target is None else target.T
            yield self._part_of_stack(name, expert, shape, part, target)
            return
        if target is None:
            part, target = (slice(0), slice(0)), torch.empty(0, 0)
        yield WeightShard(name=own_name, shape=shape, part=part, target=target)

    def _mxfp4_matrix(
        self,
        name: str,
        expert: int,
        shape: tuple[int, int],
        part: tuple[slice, slice],
        target: Mxfp4Matrix | None,
    ) -> Iterator[WeightShard]:
        rows, inputs = part
        num_blocks = shape[1] // MXFP4_BLOCK_SIZE
        first, end, _ = inputs.indices(shape[1])
        blocks = slice(first // MXFP4_BLOCK_SIZE, end // MXFP4_BLOCK_SIZE)
        yield self._part_of_stack(
            f"{name}_blocks",
            expert,
            (shape[0], num_blocks, BLOCK_BYTES),
            (rows, blocks, _ALL),
            None if target is None else target.blocks,
        )
        yield self._part_of_stack(
            f"{name}_scales",
            expert,
            (shape[0], num_blocks),
            (rows, blocks),
            None if target is None else target.scales,
            # The size of typical weights.
            dummy=2.0**-7,
        )

    def _part_of_stack(
        self,
        name: str,
        expert: int,
        shape: tuple[int, ...],
        part: tuple[slice, ...],
        target: torch.Tensor | None,
        *,
        dummy: float | None = None,
    ) -> WeightShard:
        """Return an expert's part of the stack of all experts, or nothing without a target."""
        rows = slice(expert, expert + 1)
        if target is None:
            rows, target = slice(0), torch.empty((0,) * len(shape))
        return WeightShard(
            name=name,
            shape=(self._config.num_experts, *shape),
            part=(rows, *part),
            target=target[None],
            dummy=dummy,
        )
