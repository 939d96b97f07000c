"""The parts of fused layers: attention, recurrent layers, MLPs and experts.

Each runs the weights of a plain part. It may read rows that are quantized or not normed yet, and
add its output to the residual stream. `workers.models.fused_layers` connects the parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import DeferredRMSNorm, QuantizedRows, Rotary
from workers.layers.fused_kernels import quantized_gate_kernel
from workers.layers.mlp import MLP, GatedMLP, NoMLP
from workers.layers.recurrent import RecurrentLayer
from workers.models.fused_norm import Delta, Reader, Rows
from workers.models.self_attention import DecoderSelfAttention, SelectedAttention, StepAttention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from workers.layers.expert_product import Choice
    from workers.layers.experts import ExpertLayer
    from workers.layers.linear import RowParallelLinear
    from workers.layers.linear_kernel import LinearKernel
    from workers.layers.rope import Rotation

__all__ = ["FusedAttention", "FusedMLP", "FusedRecurrence", "fused_mixer", "fused_mlp"]


class FusedMixer(Reader, ABC):
    """Attention, or a recurrent layer: the output projection of both."""

    def __init__(self, output: RowParallelLinear) -> None:
        self._output = output.kernel

    @abstractmethod
    def heads(self, x: Rows, rotation: Rotation, attention: StepAttention) -> torch.Tensor:
        """Return the input of the output projection, `[num_tokens, columns of this rank]`."""

    def forward_residual(self, stream: torch.Tensor, heads: torch.Tensor) -> Delta:
        """Add the output to the stream, in place, if one kernel does both; else return it."""
        return self._output.forward_residual(stream, heads)

    def partial(self, heads: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the output, `[num_tokens, hidden_size]`."""
        return self._output(heads)


class FusedAttention(FusedMixer):
    """Self attention that reads `Rows`."""

    def __init__(self, attention: DecoderSelfAttention, *, is_last: bool) -> None:
        super().__init__(attention.output)
        self._attention = attention
        self._kernel = attention.qkv.kernel
        self.num_columns = attention.qkv.num_columns
        self._parts: tuple[LinearKernel, LinearKernel] | None = None
        """The products of queries and of keys and values, if the last layer can have both."""
        if is_last and attention.rotates_products:
            queries = self._kernel.part(slice(attention.query_size))
            others = self._kernel.part(slice(attention.query_size, self.num_columns))
            if queries is not None and others is not None:
                self._parts = queries, others

    def accepts_quantized(self, num_rows: int) -> bool:
        return self._kernel.accepts_quantized(num_rows)

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return self._kernel.accepts_deferred_norm(num_rows)

    def heads(self, x: Rows, rotation: Rotation, attention: StepAttention) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            if isinstance(attention, SelectedAttention) and self._parts is not None:
                selected = rotation.select(attention.indices)
                if selected is not None:
                    rotations = selected, rotation
                    return self._attend_selected(x, self._parts, rotations, attention)
            rotary = self._rotary_of_products(rotation, (len(x),))
            if rotary is not None:
                qkv = x.new_empty(len(x), self.num_columns)
                self._write_qkv(x, qkv, rotary)
                return self._attention.attend(qkv, None, attention)
        return self._attention.attend(_product(self._kernel, x), rotation, attention)

    def heads_of_batches(
        self,
        batches: Iterable[Rows],
        sizes: Sequence[int],
        rotation: Rotation,
        attention: StepAttention,
        qkv: torch.Tensor,
    ) -> torch.Tensor:
        """Return what `heads` does for batches of these sizes, which may be computed in turn.

        `qkv` is memory for products, `[num_tokens, num_columns]`.
        """
        rotary = self._rotary_of_products(rotation, sizes)
        rotaries = [None] * len(sizes) if rotary is None else rotary.split(sizes)
        for rows, out, of_batch in zip(batches, qkv.split(sizes), rotaries, strict=True):
            self._write_qkv(rows, out, of_batch)
        return self._attention.attend(qkv, rotation if rotary is None else None, attention)

    def _rotary_of_products(self, rotation: Rotation, sizes: Iterable[int]) -> Rotary | None:
        """Return what `_write_qkv` needs to rotate the heads itself.

        None if that takes longer for one of the numbers of tokens, or something comes in between.
        """
        attention = self._attention
        if rotation.rotary is None or not attention.rotates_products:
            return None
        head_size, num_rotated = attention.head_size, attention.rotated_size
        if not all(self._kernel.rotates(size, head_size, num_rotated) for size in sizes):
            return None
        return rotation.rotary

    def _write_qkv(self, x: Rows, out: torch.Tensor, rotary: Rotary | None) -> None:
        """Write the queries, keys and values of some tokens to `out`, rotated if `rotary` is given.

        `rotary` is that of these tokens.
        """
        if rotary is not None:
            assert isinstance(x, torch.Tensor)
            self._kernel.write_rotated(x, rotary, self._attention.rotated_size, out)
        elif isinstance(x, torch.Tensor):
            self._kernel.write(x, out)
        else:
            out.copy_(_product(self._kernel, x))

    def _attend_selected(
        self,
        x: torch.Tensor,
        parts: tuple[LinearKernel, LinearKernel],
        rotations: tuple[Rotation, Rotation],
        attention: SelectedAttention,
    ) -> torch.Tensor:
        """Return the attention of the selected tokens, and compute no other queries.

        `parts` and `rotations` belong to the queries, then to the keys.
        """
        (query_part, kv_part), (query_rotation, key_rotation) = parts, rotations
        by_head = (-1, self._attention.head_size)
        key, value = kv_part(x).unflatten(1, by_head).chunk(2, dim=1)
        key = key_rotation(key)
        # A chunk before a prompt's end has none, and kernels take at least one row.
        query = x.new_empty(0, self._attention.query_size).unflatten(1, by_head)
        if len(attention.indices):
            query = query_part(x.index_select(0, attention.indices))
            query = query_rotation(query.unflatten(1, by_head))
        return attention.attend_selected(self._attention.layer, query, key, value)


class FusedRecurrence(FusedMixer):
    """A recurrent layer that reads `Rows`."""

    def __init__(self, layer: RecurrentLayer) -> None:
        super().__init__(layer.output)
        self._layer = layer
        self._kernel, self._gates = layer.input.kernel, layer.gates

    def accepts_quantized(self, num_rows: int) -> bool:
        return self._gates is None and self._kernel.accepts_quantized(num_rows)

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return self._gates is None and self._kernel.accepts_deferred_norm(num_rows)

    def heads(self, x: Rows, rotation: Rotation, attention: StepAttention) -> torch.Tensor:
        gates = None
        if isinstance(x, DeferredRMSNorm):
            conv = self._layer.row_conv(attention)
            if conv is not None:
                columns = self._kernel.convolved_with_norm(x, conv)
                return self._layer.heads(columns, None, attention, is_convolved=True)
        if self._gates is not None:
            assert isinstance(x, torch.Tensor)
            gates = self._gates(x)
        return self._layer.heads(_product(self._kernel, x), gates, attention)


class FusedMLP(Reader):
    """An MLP that reads `Rows`, and adds its output to the residual stream."""

    def __init__(self, mlp: MLP) -> None:
        self._mlp = mlp
        self._inner, self._down = mlp.inner.kernel, mlp.down.kernel
        self._is_gated = isinstance(mlp, GatedMLP)
        self._quantized_gate = None
        if self._is_gated:
            self._quantized_gate = quantized_gate_kernel(mlp.activation, self._inner.weight.device)

    def accepts_quantized(self, num_rows: int) -> bool:
        return self._inner.accepts_quantized(num_rows)

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return self._inner.accepts_deferred_norm(num_rows)

    def partial(self, x: Rows) -> torch.Tensor:
        """Return this rank's part of the output, `[num_tokens, hidden_size]`."""
        columns = self._columns(x)
        if isinstance(columns, QuantizedRows):
            return self._down.forward_quantized(columns)
        return self._down(columns)

    def forward_residual(self, stream: torch.Tensor, x: Rows) -> Delta:
        """Add the output to the stream, in place, if one kernel does both; else return it."""
        columns = self._columns(x)
        if isinstance(columns, QuantizedRows):
            return self._down.forward_quantized(columns)
        return self._down.forward_residual(stream, columns)

    def _columns(self, x: Rows) -> torch.Tensor | QuantizedRows:
        if self._quantized_gate is not None and self._down.accepts_quantized(len(x)):
            return self._quantized_gate(_product(self._inner, x))
        if self._is_gated:
            if isinstance(x, DeferredRMSNorm):
                return self._inner.gated_with_norm(x, self._mlp.activation)
            if isinstance(x, torch.Tensor):
                return self._inner.gated(x, self._mlp.activation)
        return self._mlp.activate(_product(self._inner, x))


class FusedExperts(Reader):
    """Experts as an MLP: the router may compute the norm of a row."""

    def __init__(self, experts: ExpertLayer) -> None:
        self._experts = experts

    def accepts_deferred_norm(self, num_rows: int) -> bool:
        return self._experts.router.accepts_deferred_norm(num_rows)

    def partial(self, x: Rows) -> torch.Tensor:
        """Return this rank's part of the output, `[num_tokens, hidden_size]`."""
        return self._experts.partial(*self._chosen(x))

    def forward_residual(self, stream: torch.Tensor, x: Rows) -> Delta:
        """Add the output to the stream, in place, if one kernel does both; else return it."""
        return self._experts.forward_residual(stream, *self._chosen(x))

    def _chosen(self, x: Rows) -> tuple[torch.Tensor, Choice]:
        """Return the inputs of the experts, and the choice of the router."""
        if isinstance(x, DeferredRMSNorm):
            return self._experts.router.with_norm(x)
        assert isinstance(x, torch.Tensor)
        return x, self._experts.choose(x)


class FusedNoMLP(Reader):
    """The MLP of a layer without an MLP."""

    def partial(self, x: Rows) -> torch.Tensor:
        """Return zeros."""
        assert isinstance(x, torch.Tensor)
        return torch.zeros_like(x)

    def forward_residual(self, stream: torch.Tensor, x: Rows) -> None:
        """Add nothing."""


def fused_mixer(
    layer: DecoderSelfAttention | RecurrentLayer, *, is_last: bool
) -> FusedAttention | FusedRecurrence:
    """Return the fused form of attention, or of the recurrent layer in its place."""
    if isinstance(layer, RecurrentLayer):
        return FusedRecurrence(layer)
    return FusedAttention(layer, is_last=is_last)


def fused_mlp(mlp: MLP | ExpertLayer | NoMLP) -> FusedMLP | FusedExperts | FusedNoMLP:
    """Return the fused form of an MLP, of experts, or of nothing in their place."""
    if isinstance(mlp, NoMLP):
        return FusedNoMLP()
    return FusedMLP(mlp) if isinstance(mlp, MLP) else FusedExperts(mlp)


def _product(kernel: LinearKernel, x: Rows) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return kernel(x)
    if isinstance(x, QuantizedRows):
        return kernel.forward_quantized(x)
    return kernel.forward_with_norm(x)
