"""Layers that keep a state of each sequence, in place of the keys and values of its tokens.

Owns the weights, and how heads and states are sharded over the ranks. `attention.kernels.recurrent`
has the kernels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch.nn import functional

from attention.abstract import StateTensor
from attention.kernels.arguments import DeltaGates, GatedNorm, RowConv, ScanGates, Segments
from attention.kernels.recurrent import causal_conv, gated_delta_rule, gated_norm, selective_scan
from pagedray.rank_roofline import WeightWork
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear, columns_of
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard, part_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagedray.model_config import ModelConfig, RecurrentConfig, RecurrentKind
    from pagedray.weight_format import Quantization
    from workers.parallel.group import ParallelGroup

__all__ = ["RecurrentLayer", "StepStates", "layer_states", "make_recurrent"]


@dataclass(frozen=True, slots=True, eq=False)
class StepStates:
    """The states of recurrent layers, and which tokens of a step advance them."""

    segments: Segments
    layers: tuple[tuple[torch.Tensor, ...], ...]
    """The tensors of each recurrent layer, `[num_rows, *StateTensor.shape]`, strided."""
    kept: list[Callable[[Segments], object]] = field(default_factory=list)
    """A function of each layer that advances its states, if the segments keep the states."""

    def accept(self, token_ids: torch.Tensor, sampled_ids: torch.Tensor) -> None:
        """Advance the kept states of all layers by accepted tokens, as `Segments.accepted` does."""
        accepted = self.segments.accepted(token_ids, sampled_ids)
        for advance in self.kept:
            advance(accepted)


class HasStates(Protocol):
    """The part of a step that recurrent layers read."""

    states: StepStates | None


def layer_states(config: ModelConfig, group: ParallelGroup) -> tuple[tuple[StateTensor, ...], ...]:
    """Return the state of each recurrent layer on a rank; empty if there are no such layers."""
    recurrent = config.recurrent
    if recurrent is None:
        return ()
    dtype = getattr(torch, config.dtype)
    parts = _conv_parts(config, recurrent, group)
    num_channels = sum(part.stop - part.start for part in parts)
    tensors = [StateTensor((recurrent.conv_width - 1, num_channels), dtype)]
    if recurrent.kind != "short_conv":
        num_heads = recurrent.num_value_heads // group.size
        shape = num_heads, recurrent.value_size, recurrent.key_size
        tensors.append(StateTensor(shape, getattr(torch, recurrent.matrix_dtype)))
    return (tuple(tensors),) * len(recurrent.layers)


def make_recurrent(
    prefix: str, config: ModelConfig, layer_index: int, place: Placement
) -> RecurrentLayer:
    """Return the recurrent layer of a decoder layer."""
    assert config.recurrent is not None
    kind = _KINDS[config.recurrent.kind]
    return kind(f"{prefix}.{config.names.recurrent}", config, layer_index, place)


class RecurrentLayer(CompositeLayer):
    """A recurrent layer: projections, a causal convolution, a recurrence, an output projection."""

    input: ColumnParallelLinear
    """All projections of the layer's input except `gates`."""
    gates: ColumnParallelLinear | None = None
    """Columns of the input in another format, or None."""
    output: RowParallelLinear
    _first_channel: int | None = None
    """The first column of `input` that is convolved as it is, or None."""

    def __init__(
        self, prefix: str, config: ModelConfig, layer_index: int, place: Placement
    ) -> None:
        assert config.recurrent is not None
        self._config = config.recurrent
        self._prefix = prefix
        self._index = config.recurrent.layers.index(layer_index)
        self._conv = _Convolution(prefix, config, config.recurrent, place)

    def __call__(self, x: torch.Tensor, rotation: object, step: HasStates) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`.

        Tokens have no rotation.
        """
        gates = None if self.gates is None else self.gates(x)
        return self.output(self.heads(self.input(x), gates, step))

    def row_conv(self, step: HasStates) -> RowConv | None:
        """Return the convolution for the product of `input` to compute, if there is one token."""
        assert step.states is not None
        states, segments = step.states.layers[self._index], step.states.segments
        is_row = segments.max_query_len == 1 and len(segments.rows) == 1
        if self._first_channel is None or not is_row:
            return None
        return self._conv.of_row(self._first_channel, states[0], segments.rows)

    def heads(
        self,
        columns: torch.Tensor,
        gates: torch.Tensor | None,
        step: HasStates,
        *,
        is_convolved: bool = False,
    ) -> torch.Tensor:
        """Return the input of the output projection, `[num_tokens, columns of this rank]`.

        Takes the results of `input`, convolved or not, and `gates`. The states of the step's
        sequences advance by its tokens, unless they are kept.
        """
        assert step.states is not None
        states, segments = step.states.layers[self._index], step.states.segments
        if segments.keeps_states:
            advance = partial(self._mix, columns, gates, states, is_convolved=False)
            step.states.kept.append(advance)
        mixed = self._mix(columns, gates, states, segments, is_convolved=is_convolved)
        return self._finish(mixed, columns)

    def _finish(self, mixed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return the result of `heads` from those of the recurrence, which it may overwrite."""
        return mixed

    @abstractmethod
    def _mix(
        self,
        columns: torch.Tensor,
        gates: torch.Tensor | None,
        states: tuple[torch.Tensor, ...],
        segments: Segments,
        *,
        is_convolved: bool,
    ) -> torch.Tensor:
        """Return the results of the recurrence; `states` are those of this layer, and advance."""


class ShortConvLayer(RecurrentLayer):
    """A convolution between two gates, as in LFM2."""

    def __init__(
        self, prefix: str, config: ModelConfig, layer_index: int, place: Placement
    ) -> None:
        super().__init__(prefix, config, layer_index, place)
        size = config.hidden_size
        part = size, part_of(size, place.group)
        self.input = ColumnParallelLinear(
            size,
            columns_of((f"{prefix}.in_proj",), [part] * 3),
            place,
            has_bias=self._config.has_bias,
        )
        self.output = RowParallelLinear(
            f"{prefix}.out_proj", size, size, place, has_bias=self._config.has_output_bias
        )

    def _mix(
        self,
        columns: torch.Tensor,
        gates: torch.Tensor | None,
        states: tuple[torch.Tensor, ...],
        segments: Segments,
        *,
        is_convolved: bool,
    ) -> torch.Tensor:
        before, _, inner = columns.chunk(3, dim=1)
        (conv_states,) = states
        return self._conv(before * inner, conv_states, segments, None)

    def _finish(self, mixed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return mixed.mul_(columns.chunk(3, dim=1)[1])


class MatrixLayer(RecurrentLayer):
    """A recurrent layer with a matrix for each head, which reads the results of the convolution.

    A rank has some heads of keys, and the heads of values that share them.
    """

    def __init__(
        self,
        prefix: str,
        config: ModelConfig,
        layer_index: int,
        place: Placement,
        columns: Sequence[Columns],
    ) -> None:
        """`columns` are the columns of `input`."""
        super().__init__(prefix, config, layer_index, place)
        recurrent, multipliers = self._config, config.multipliers
        self.input = ColumnParallelLinear(
            config.hidden_size,
            columns,
            place,
            has_bias=recurrent.has_bias,
            input_scale=multipliers.recurrent_input,
        )
        self._vectors = _HeadVectors(prefix, recurrent, place)
        size = recurrent.num_value_heads * recurrent.value_size
        self._num_values = size // place.group.size
        """Columns of the heads of values on this rank."""
        self.output = RowParallelLinear(
            f"{prefix}.out_proj",
            size,
            config.hidden_size,
            place,
            has_bias=recurrent.has_output_bias,
            scale=multipliers.recurrent_output,
        )

    def _channels(
        self, inner: torch.Tensor, states: torch.Tensor, segments: Segments, *, is_convolved: bool
    ) -> Sequence[torch.Tensor]:
        """Return the results of the convolution by kind of channels."""
        if not is_convolved:
            inner = self._conv(inner, states, segments, "silu")
        return torch.split(inner, self._conv.sizes, dim=1)

    def _keys(self, columns: torch.Tensor) -> torch.Tensor:
        """Return columns as heads, `[num_tokens, num_key_heads, key_size]`."""
        heads: torch.Tensor = columns.unflatten(1, (-1, self._config.key_size))
        return heads

    def _values(self, columns: torch.Tensor) -> torch.Tensor:
        """Return columns as heads, `[num_tokens, num_value_heads, value_size]`."""
        heads: torch.Tensor = columns.unflatten(1, (-1, self._config.value_size))
        return heads


class DeltaRuleLayer(MatrixLayer):
    """A gated delta rule, as in Qwen3-Next and Qwen3.5.

    S. Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
    """

    _first_channel = 0

    def __init__(
        self, prefix: str, config: ModelConfig, layer_index: int, place: Placement
    ) -> None:
        assert config.recurrent is not None
        recurrent, group = config.recurrent, place.group
        columns = _delta_columns(prefix, config, recurrent, group)
        gates = _gate_columns(prefix, recurrent, group)
        has_gates = _have_one_format(columns, gates, place.quantization)
        if has_gates:
            columns += gates
        super().__init__(prefix, config, layer_index, place, columns)
        if not has_gates:
            self.gates = ColumnParallelLinear(config.hidden_size, gates, place, has_bias=False)
        size = recurrent.value_size
        self._norm = _NormWeight(f"{prefix}.norm", size, slice(0, size), config.norm_eps, place)

    def _mix(
        self,
        columns: torch.Tensor,
        gates: torch.Tensor | None,
        states: tuple[torch.Tensor, ...],
        segments: Segments,
        *,
        is_convolved: bool,
    ) -> torch.Tensor:
        vectors, norm = self._vectors, self._norm
        num_channels = sum(self._conv.sizes)
        inner, z, rest = columns.tensor_split(
            (num_channels, num_channels + self._num_values), dim=1
        )
        b, a = (rest if gates is None else gates).chunk(2, dim=1)
        conv_states, matrices = states
        query, key, value = self._channels(inner, conv_states, segments, is_convolved=is_convolved)
        out = gated_delta_rule(
            self._keys(query),
            self._keys(key),
            self._values(value),
            DeltaGates(a=a, b=b, a_log=vectors.a_log, dt_bias=vectors.dt_bias),
            GatedNorm(z=self._values(z), weight=norm.weight, eps=norm.eps),
            matrices,
            segments,
        )
        return out.flatten(1)


class ScanLayer(MatrixLayer):
    """A selective scan, as in Mamba-2.

    T. Dao and A. Gu, "Transformers are SSMs", 2024. All ranks have the keys and queries that all
    heads share, if they do.
    """

    def __init__(
        self, prefix: str, config: ModelConfig, layer_index: int, place: Placement
    ) -> None:
        assert config.recurrent is not None
        recurrent = config.recurrent
        columns = _scan_columns(prefix, config, recurrent, place.group)
        super().__init__(prefix, config, layer_index, place, columns)
        self._first_channel = self._num_values
        self._norm: _GroupNorm | _Gate = _Gate()
        if recurrent.scan_norm is not None:
            self._norm = _GroupNorm(f"{prefix}.norm", recurrent, config.norm_eps, place)

    def _mix(
        self,
        columns: torch.Tensor,
        gates: torch.Tensor | None,
        states: tuple[torch.Tensor, ...],
        segments: Segments,
        *,
        is_convolved: bool,
    ) -> torch.Tensor:
        vectors, first = self._vectors, self._num_values
        _, inner, steps = columns.tensor_split((first, first + sum(self._conv.sizes)), dim=1)
        conv_states, matrices = states
        values, b, c = self._channels(inner, conv_states, segments, is_convolved=is_convolved)
        out = selective_scan(
            self._values(values),
            self._keys(b),
            self._keys(c),
            ScanGates(dt=steps, a_log=vectors.a_log, dt_bias=vectors.dt_bias, d=vectors.skip),
            matrices,
            segments,
        )
        return out.flatten(1)

    def _finish(self, mixed: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self._norm(mixed, columns[:, : self._num_values])


_KINDS: dict[RecurrentKind, type[RecurrentLayer]] = {
    "short_conv": ShortConvLayer,
    "delta_rule": DeltaRuleLayer,
    "mamba2": ScanLayer,
}


class _Convolution(Layer):
    """The causal depthwise convolution of a rank's channels."""

    def __init__(
        self, prefix: str, config: ModelConfig, recurrent: RecurrentConfig, place: Placement
    ) -> None:
        name = "conv" if recurrent.kind == "short_conv" else "conv1d"
        self._name = f"{prefix}.{name}"
        self._parts = _conv_parts(config, recurrent, place.group)
        self._total = _num_channels(config, recurrent)
        self.sizes = [part.stop - part.start for part in self._parts]
        """Channels of each kind on this rank."""
        num_channels = sum(self.sizes)
        self._weight = torch.empty(
            num_channels, recurrent.conv_width, dtype=place.dtype, device=place.device
        )
        self._bias = None
        if recurrent.has_conv_bias:
            self._bias = torch.empty(num_channels, dtype=place.dtype, device=place.device)

    def __call__(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        segments: Segments,
        activation: Literal["silu"] | None,
    ) -> torch.Tensor:
        """Return `[num_tokens, num_channels]` for `[num_tokens, num_channels]`."""
        return causal_conv(x, self._weight, self._bias, states, segments, activation)

    def of_row(self, first_column: int, states: torch.Tensor, rows: torch.Tensor) -> RowConv:
        """Return the same with SiLU, of one token, for a product to compute."""
        return RowConv(
            first_column=first_column,
            weight=self._weight,
            bias=self._bias,
            states=states,
            rows=rows,
        )

    def weight_shards(self) -> Iterator[WeightShard]:
        first, width = 0, self._weight.shape[1]
        for part in self._parts:
            rows = slice(first, first + part.stop - part.start)
            yield WeightShard(
                name=f"{self._name}.weight",
                shape=(self._total, 1, width),
                part=(part, slice(None), slice(None)),
                target=self._weight[rows].unsqueeze(1),
            )
            if self._bias is not None:
                bias = self._bias[rows]
                yield WeightShard.of_vector(f"{self._name}.bias", self._total, part, bias)
            first = rows.stop

    def weight_work(self) -> WeightWork:
        num_bias_bytes = 0 if self._bias is None else self._bias.nbytes
        return WeightWork(num_bytes=self._weight.nbytes + num_bias_bytes)


class _HeadVectors(Layer):
    """The decay and the bias of the step size of each head, and the factor of its inputs."""

    def __init__(self, prefix: str, recurrent: RecurrentConfig, place: Placement) -> None:
        self._prefix = prefix
        self._num_heads = recurrent.num_value_heads
        self._part = part_of(self._num_heads, place.group)
        size = self._part.stop - self._part.start
        self.a_log, self.dt_bias = torch.empty(2, size, device=place.device)
        has_skip = recurrent.kind == "mamba2"
        self.skip = torch.empty(size if has_skip else 0, device=place.device)
        """Only selective scans add their inputs to the results."""

    def weight_shards(self) -> Iterator[WeightShard]:
        targets = {"A_log": self.a_log, "dt_bias": self.dt_bias}
        if len(self.skip):
            targets["D"] = self.skip
        for suffix, target in targets.items():
            name = f"{self._prefix}.{suffix}"
            yield WeightShard.of_vector(name, self._num_heads, self._part, target, dummy=0.0)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self.a_log.nbytes + self.dt_bias.nbytes + self.skip.nbytes)


class _NormWeight(Layer):
    """This rank's part of the weight of a norm of results."""

    def __init__(self, name: str, size: int, part: slice, eps: float, place: Placement) -> None:
        self._name = name
        self._size, self._part = size, part
        self.eps = eps
        self.weight = torch.empty(part.stop - part.start, dtype=place.dtype, device=place.device)

    def weight_shards(self) -> Iterator[WeightShard]:
        name = f"{self._name}.weight"
        yield WeightShard.of_vector(name, self._size, self._part, self.weight, dummy=1.0)

    def weight_work(self) -> WeightWork:
        return WeightWork(num_bytes=self.weight.nbytes)


class _Gate(Layer):
    """The gate of results that have no norm."""

    def __call__(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return `x * silu(z)`; all are `[num_tokens, columns of this rank]`."""
        return functional.silu(z).mul_(x)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield from ()


class _GroupNorm(_NormWeight):
    """RMSNorm of results over groups of heads; ranks sum over a group that they share."""

    def __init__(self, name: str, recurrent: RecurrentConfig, eps: float, place: Placement) -> None:
        num_groups = recurrent.num_key_heads
        size = recurrent.num_value_heads * recurrent.value_size
        super().__init__(name, size, part_of(size, place.group), eps, place)
        self._gates_first = recurrent.scan_norm == "after_gate"
        self._group_size = size // num_groups
        self._sums_over = place.group if num_groups < place.group.size else None

    def __call__(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x` with gate `z`; all are `[num_tokens, columns of this rank]`."""
        if self._sums_over is None:
            groups = (-1, self._group_size)
            norm = GatedNorm(
                z=z.unflatten(1, groups), weight=self.weight.unflatten(0, groups), eps=self.eps
            )
            normed = gated_norm(x.unflatten(1, groups), norm, gates_first=self._gates_first)
            return normed.flatten(1)
        gates = functional.silu(z.float())
        values = x * gates if self._gates_first else x.float()
        squares = self._sums_over.all_reduce(values.square().sum(1, keepdim=True))
        normed = values * torch.rsqrt(squares / self._group_size + self.eps)
        if not self._gates_first:
            return normed.mul_(self.weight).mul_(gates).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


def _num_channels(config: ModelConfig, recurrent: RecurrentConfig) -> int:
    if recurrent.kind == "short_conv":
        return config.hidden_size
    keys = recurrent.num_key_heads * recurrent.key_size
    return 2 * keys + recurrent.num_value_heads * recurrent.value_size


def _conv_parts(
    config: ModelConfig, recurrent: RecurrentConfig, group: ParallelGroup
) -> tuple[slice, ...]:
    """Return this rank's channels of the convolution: queries, keys and values.

    Those of a selective scan are its inputs, then B and C, of which ranks may share the only group.
    """
    if recurrent.kind == "short_conv":
        return (part_of(config.hidden_size, group),)
    keys = recurrent.num_key_heads * recurrent.key_size
    if recurrent.kind == "mamba2":
        size = recurrent.num_value_heads * recurrent.value_size
        shared = slice(0, keys) if recurrent.num_key_heads < group.size else part_of(keys, group)
        b, c = (slice(first + shared.start, first + shared.stop) for first in (size, size + keys))
        return part_of(size, group), b, c
    sizes = keys, keys, recurrent.num_value_heads * recurrent.value_size
    return _parts_of(sizes, group)


def _parts_of(sizes: Sequence[int], group: ParallelGroup) -> tuple[slice, ...]:
    """Return this rank's part of each of several runs of columns."""
    parts, first = [], 0
    for size in sizes:
        part = part_of(size, group)
        parts.append(slice(first + part.start, first + part.stop))
        first += size
    return tuple(parts)


def _delta_columns(
    prefix: str, config: ModelConfig, recurrent: RecurrentConfig, group: ParallelGroup
) -> list[Columns]:
    """Return the columns of this rank: queries, keys, values and the gate of the output."""
    values = recurrent.num_value_heads * recurrent.value_size
    if recurrent.is_fused_by_head:
        heads = recurrent.num_value_heads // recurrent.num_key_heads * recurrent.value_size
        sizes = recurrent.key_size, recurrent.key_size, heads, heads
        return _columns_by_key_head(f"{prefix}.in_proj_qkvz", sizes, recurrent, group)
    name, total = f"{prefix}.in_proj_qkv", _num_channels(config, recurrent)
    columns = [
        Columns(name=name, total=total, part=part) for part in _conv_parts(config, recurrent, group)
    ]
    gate = Columns(name=f"{prefix}.in_proj_z", total=values, part=part_of(values, group))
    return [*columns, gate]


def _scan_columns(
    prefix: str, config: ModelConfig, recurrent: RecurrentConfig, group: ParallelGroup
) -> list[Columns]:
    """Return the columns of this rank: the gate, the channels of the convolution, step sizes."""
    size, num_heads = recurrent.num_value_heads * recurrent.value_size, recurrent.num_value_heads
    first_head = size + _num_channels(config, recurrent)
    channels = [
        slice(size + part.start, size + part.stop) for part in _conv_parts(config, recurrent, group)
    ]
    heads = part_of(num_heads, group)
    steps = slice(first_head + heads.start, first_head + heads.stop)
    parts = part_of(size, group), *channels, steps
    return [
        Columns(name=f"{prefix}.in_proj", total=first_head + num_heads, part=part, scale=scale)
        for part, scale in zip(parts, config.multipliers.recurrent_columns, strict=True)
    ]


def _gate_columns(prefix: str, recurrent: RecurrentConfig, group: ParallelGroup) -> list[Columns]:
    """Return the columns of this rank that have a number for each value head: beta, then decay."""
    num_heads = recurrent.num_value_heads
    if recurrent.is_fused_by_head:
        num_shared = num_heads // recurrent.num_key_heads
        sizes = num_shared, num_shared
        return _columns_by_key_head(f"{prefix}.in_proj_ba", sizes, recurrent, group)
    names = f"{prefix}.in_proj_b", f"{prefix}.in_proj_a"
    return columns_of(names, [(num_heads, part_of(num_heads, group))] * 2)


def _have_one_format(
    columns: Sequence[Columns], gates: Sequence[Columns], quantization: Quantization | None
) -> bool:
    """Return whether a product of all these columns is possible: few are often stored plainly."""
    if quantization is None:
        return True
    formats = [quantization.format_of([part.name for part in parts]) for parts in (columns, gates)]
    return formats[0] == formats[1]


def _columns_by_key_head(
    name: str, sizes: Sequence[int], recurrent: RecurrentConfig, group: ParallelGroup
) -> list[Columns]:
    """Return this rank's columns of a tensor of which each key head has runs of these sizes."""
    heads = part_of(recurrent.num_key_heads, group)
    size = sum(sizes)
    total, first, columns = recurrent.num_key_heads * size, 0, []
    for run in sizes:
        starts = [head * size + first for head in range(heads.start, heads.stop)]
        columns += [Columns(name=name, total=total, part=slice(i, i + run)) for i in starts]
        first += run
    return columns
