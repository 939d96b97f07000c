"""Experts instead of an MLP, sharded over the ranks as an MLP is.

N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
Layer", 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.errors import CheckpointError
from pagedray.rank_roofline import WeightWork
from pagedray.weight_format import MXFP4_BLOCK_SIZE, Fp8Format
from workers.layers.expert_product import (
    Choice,
    ExpertPart,
    ExpertProduct,
    Router,
    SigmoidRouter,
    make_expert_product,
)
from workers.layers.formats.fp8_weight import Fp8Weight
from workers.layers.formats.mxfp4 import BLOCK_BYTES, Mxfp4Matrix
from workers.layers.linear import ColumnParallelLinear, Columns, columns_of
from workers.layers.weight import Layer, MatrixPart, Placement, WeightShard, part_of, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ExpertsConfig, TensorNames
    from pagedray.weight_format import Quantization
    from workers.layers.mlp import MLP

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
        """`shared` is an MLP that every token passes, unless it is stacked."""
        self._shared_gate = None
        if experts.has_shared_gate and not experts.num_stacked:
            columns = Columns(name=f"{prefix}.{names.shared_gate}", total=1, part=slice(0, 1))
            self._shared_gate = ColumnParallelLinear(hidden_size, [columns], place, has_bias=False)
        inner_size = experts.latent_size or hidden_size
        self._latent: tuple[ColumnParallelLinear, ...] = ()
        """The projections before and behind experts, which all ranks have as a whole."""
        if experts.latent_size is not None:
            sizes = (hidden_size, inner_size), (inner_size, hidden_size)
            self._latent = tuple(
                _whole_linear(f"{prefix}.{name}", *of, place)
                for name, of in zip(names.latent, sizes, strict=True)
            )
        self._num_experts = experts.num_experts
        self._num_chosen = experts.num_chosen
        self._num_inputs = experts.num_inputs
        self._num_stacked = experts.num_stacked
        self._hidden_size = inner_size
        self._group = place.group
        self._shared = shared
        self._tensors = ExpertTensors(prefix, names, experts, hidden_size=inner_size, place=place)
        self.router = _make_router(prefix, names, experts, place, hidden_size)
        self._product = make_expert_product(
            ExpertPart(
                config=experts,
                experts=self._tensors.experts,
                hidden_size=inner_size,
                intermediate_size=self._tensors.intermediate_size,
                has_output_bias=self._tensors.has_output_bias,
                fp8=self._tensors.fp8,
                dtype=place.dtype,
                device=place.device,
            )
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        return self._group.all_reduce(self.partial(x))

    def choose(self, x: torch.Tensor) -> Choice:
        """Return the experts of each token; `x` is the router's input."""
        return self.router(x)

    def partial(self, x: torch.Tensor, choice: Choice | None = None) -> torch.Tensor:
        """Return this rank's part of the output. Without a choice, the router reads `x`."""
        choice = self.choose(x) if choice is None else choice
        if self._latent:
            before, behind = self._latent
            # The parts of ranks are summed behind it.
            out = behind(self._product(before(x), choice))
        else:
            out = self._product(x, choice)
        if self._shared is None:
            return out
        shared = self._shared.partial(x)
        if self._shared_gate is not None:
            shared.mul_(self._shared_gate(x).sigmoid())
        return out.add_(shared)

    def forward_residual(
        self, stream: torch.Tensor, x: torch.Tensor, choice: Choice
    ) -> torch.Tensor | None:
        """Add the output to the stream, in place, if one kernel does both; else return it."""
        if self._latent or self._shared is not None:
            return self.partial(x, choice)
        return self._product.forward_residual(stream, x, choice)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from self.router.weight_shards()
        yield from self._tensors.weight_shards(self._product)
        if self._shared is not None:
            yield from self._shared.weight_shards()
        if self._shared_gate is not None:
            yield from self._shared_gate.weight_shards()
        for layer in self._latent:
            yield from layer.weight_shards()

    def weight_work(self) -> WeightWork:
        tensors = self._tensors
        # The part of experts that a rank has as a whole.
        part = len(tensors.experts) / self._num_experts
        size = self._hidden_size * tensors.intermediate_size
        num_stacked, num_bytes = self._num_stacked, self._product.num_bytes
        # All experts of a rank are equally large.
        stacked_bytes = num_bytes * num_stacked // (len(tensors.experts) + num_stacked)
        work = self.router.weight_work() + WeightWork(
            num_bytes=stacked_bytes,
            expert_bytes=num_bytes - stacked_bytes,
            # The projections of the input, and the down projection.
            row_flop=(self._num_chosen * part + num_stacked) * (self._num_inputs + 1) * 2.0 * size,
        )
        others = (self._shared, self._shared_gate, *self._latent)
        return sum((layer.weight_work() for layer in others if layer is not None), work)

    def finalize(self) -> None:
        self.router.finalize()
        self._product.finalize()
        if self._shared is not None:
            self._shared.finalize()
        if self._shared_gate is not None:
            self._shared_gate.finalize()
        for layer in self._latent:
            layer.finalize()


def _whole_linear(name: str, in_size: int, out_size: int, place: Placement) -> ColumnParallelLinear:
    columns = Columns(name=name, total=out_size, part=slice(0, out_size))
    return ColumnParallelLinear(in_size, [columns], place, has_bias=False)


def _make_router(
    prefix: str, names: TensorNames, experts: ExpertsConfig, place: Placement, hidden_size: int
) -> Router:
    name, gate = f"{prefix}.{names.router}", f"{prefix}.{names.shared_gate}"
    if experts.has_sigmoid_scores:
        bias = f"{prefix}.{names.router_bias}"
        return SigmoidRouter(name, bias, experts, place, hidden_size=hidden_size, gate_name=gate)
    factors = None if names.expert_scales is None else f"{prefix}.{names.expert_scales}"
    return Router(name, factors, experts, place, hidden_size=hidden_size, gate_name=gate)


def _fp8_format(prefix: str, names: TensorNames, quantization: Quantization) -> Fp8Format | None:
    """Return the format of weights in fp8, or None for plain weights. Raises CheckpointError."""
    layers = names.expert_layers(prefix)
    format = quantization.format_of(layers)
    if format is None:
        return None
    assert isinstance(format, Fp8Format)
    if names.expert_output.format(0) == names.expert_output:
        raise CheckpointError(
            f"{layers[0]} is a stack of experts in fp8, which is not supported; use a checkpoint "
            "with tensors of single experts."
        )
    return format


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
        place: Placement,
    ) -> None:
        group = place.group
        self._prefix = prefix
        self.fp8 = None
        """The format of weights in fp8, or None."""
        if place.quantization is not None:
            self.fp8 = _fp8_format(prefix, names, place.quantization)
        self._names = names
        self._config = config
        self._hidden_size = hidden_size
        ours, part = slice(0, config.num_experts), slice(0, config.intermediate_size)
        if config.is_expert_parallel:
            ours = part_of(config.num_experts, group)
        else:
            part = steps_of(config.intermediate_size, config.column_step(self.fp8), group)
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
        for number in range(self._config.num_stacked):
            yield from self._stacked_shards(number, product)

    def _stacked_shards(self, number: int, product: ExpertProduct) -> Iterator[WeightShard]:
        """Yield this rank's part of an equal share of the shared MLP."""
        config, names = self._config, self._names
        first = number * config.intermediate_size
        total = config.num_stacked * config.intermediate_size
        part = slice(first + self._part.start, first + self._part.stop)
        index = len(self.experts) + number
        gate_up, down = product.gate_up(index), product.down(index)
        assert isinstance(gate_up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        inputs = [f"{self._prefix}.{name}" for name in names.shared_input]
        layers = columns_of(inputs, [(total, part)] * config.num_inputs)
        targets = gate_up.chunk(config.num_inputs)
        for columns, target in zip(layers, targets, strict=True):
            yield WeightShard(
                name=f"{columns.name}.weight",
                shape=(columns.total, self._hidden_size),
                part=(columns.part, _ALL),
                target=target,
            )
        yield WeightShard(
            name=f"{self._prefix}.{names.shared_output}.weight",
            shape=(self._hidden_size, total),
            part=(_ALL, part),
            target=down,
        )

    def _input_shards(self, expert: int, product: ExpertProduct) -> Iterator[WeightShard]:
        size, hidden_size = self.intermediate_size, self._hidden_size
        index = self._index_of(expert)
        for number, (name, total, columns) in enumerate(self._input_columns()):
            rows = slice(number * size, (number + 1) * size)
            target = None if index is None else product.gate_up(index)
            shape, part = (total, hidden_size), (columns, _ALL)
            yield from self._matrix(name, expert, shape, part, target, rows)
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
            _ALL,
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
        if len(names) == self._config.num_inputs:
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
        target: torch.Tensor | Mxfp4Matrix | Fp8Weight | None,
        rows: slice,
    ) -> Iterator[WeightShard]:
        """Yield the tensors of `[out_size, in_size]`, which are loaded to rows of a target.

        Without a target the rank has no part.
        """
        own_name = name.format(expert)
        if self.fp8 is not None:
            assert target is None or isinstance(target, Fp8Weight)
            yield from self._fp8_matrix(own_name, shape, part, target, rows)
            return
        assert not isinstance(target, Fp8Weight)
        target = None if target is None else target[rows]
        if self._config.is_mxfp4:
            assert not isinstance(target, torch.Tensor)
            yield from self._mxfp4_matrix(name, expert, shape, part, target)
            return
        assert not isinstance(target, Mxfp4Matrix)
        if own_name == name:
            if self._names.are_experts_transposed:
                shape, part = (shape[1], shape[0]), (part[1], part[0])
                target = None if target is None else target.T
            yield self._part_of_stack(name, expert, shape, part, target)
            return
        if target is None:
            part, target = (slice(0), slice(0)), torch.empty(0, 0)
        yield WeightShard(name=own_name, shape=shape, part=part, target=target)

    def _fp8_matrix(
        self,
        name: str,
        shape: tuple[int, int],
        part: tuple[slice, slice],
        target: Fp8Weight | None,
        rows: slice,
    ) -> Iterator[WeightShard]:
        assert self.fp8 is not None
        if target is None:
            target = Fp8Weight(self.fp8, 0, 0, device=torch.device("cpu"))
            part, rows = (slice(0), slice(0)), slice(0)
        source = MatrixPart(name=name.removesuffix(".weight"), shape=shape, part=part)
        yield from target.weight_shards(source, rows)

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
