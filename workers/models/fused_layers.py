"""The layers of a decoder on kernels that do several operations of a layer at once.

Norms add to the residual stream first, quantize for the product that follows, or are left to it;
products add to the stream, gate, or rotate queries and keys; ranks sum in the norm, or beside the
products of another half of a step's tokens; the last layer computes only selected tokens. The plain
definition is `workers.models.decoder_layer`, and both read the same weights.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase
from workers.layers.mlp import MLP
from workers.models.decoder_layer import DecoderLayer, ParallelDecoderLayer, TwoMixerDecoderLayer
from workers.models.fused_norm import Delta, FusedNorm, NormedDelta, Rows
from workers.models.fused_parts import FusedAttention, FusedRecurrence, fused_mixer, fused_mlp
from workers.models.scaled_layer import ScaledDecoderLayer
from workers.models.self_attention import (
    DecoderSelfAttention,
    SelectedAttention,
    SelectedRows,
    StepAttention,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pagedray.model_config import ModelConfig
    from workers.layers.expert_product import Choice
    from workers.layers.norm import Norm
    from workers.layers.rope import Rotation
    from workers.models.draft_head import Taps
    from workers.parallel.group import ParallelGroup

__all__ = ["FusedLayers", "LayerTail", "reserve_sums"]

_MIN_TOKENS = 6144
"""Below, the host takes about as long to launch twice as many kernels as the device to run them."""
_TILE_ROWS = 128
"""Rows of a tile of the GEMMs of many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerTail:
    """The tokens of a step between the attention of a layer and the rest of the layer."""

    residual: torch.Tensor
    """The residual stream before the layer's output is added, `[num_tokens, hidden_size]`."""
    heads: torch.Tensor
    """The attention of this rank's heads, `[num_tokens, num_heads * head_size]`."""
    other: torch.Tensor | None = None
    """Another input of the rest of the layer, `[num_tokens, size]`: that of an MLP beside
    attention, the results of a recurrent layer beside it, or the layer's embedding of each token;
    None if there is none."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LayerTail:
        """Return what a function returns for each of the tensors."""
        other = None if self.other is None else function(self.other)
        return LayerTail(function(self.residual), function(self.heads), other)

    def select(self, indices: torch.Tensor) -> LayerTail:
        """Return copies of some tokens; `indices` is `[num_selected]` int64 on their device."""
        return self.map(lambda rows: rows.index_select(0, indices))

    def select_residual(self, indices: torch.Tensor) -> LayerTail:
        """Return what `select` does if `heads` are already those of the selected tokens."""
        other = None if self.other is None else self.other.index_select(0, indices)
        return LayerTail(self.residual.index_select(0, indices), self.heads, other)

    def write(self, out: LayerTail) -> None:
        """Copy the tokens to the first ones of `out`."""
        num_tokens = len(self.residual)
        out.residual[:num_tokens].copy_(self.residual)
        out.heads[:num_tokens].copy_(self.heads)
        if self.other is not None:
            assert out.other is not None
            out.other[:num_tokens].copy_(self.other)


class FusedLayer:
    """One layer in two halves: `attend` for all tokens, `finish` for each token by itself."""

    def __init__(self, layer: DecoderLayer, group: ParallelGroup, *, is_last: bool) -> None:
        overlaps = group.size == 1
        # The norm that follows sums the parts of the ranks, unless an output is normed.
        before = _summed_by_norm(layer, group)
        after = group if layer.attention_post_norm is None else None
        self.attention_norm = FusedNorm(layer.attention_norm, sums_over=before, overlaps=overlaps)
        self.attention = fused_mixer(layer.attention, is_last=is_last)
        self._mlp_norm = FusedNorm(layer.mlp_norm, sums_over=after, overlaps=overlaps)
        self.mlp = fused_mlp(layer.mlp)
        self._post_norms = tuple(
            None if norm is None else FusedNorm(norm, overlaps=overlaps)
            for norm in (layer.attention_post_norm, layer.mlp_post_norm)
        )
        self._group = group
        self._scale = layer.residual_scale
        # A rank that has a part of a sum cannot add it to the stream.
        self._adds_products = group.size == 1 and self._scale == 1.0

    def attend(
        self, residual: torch.Tensor, delta: Delta, rotation: Rotation, attention: StepAttention
    ) -> LayerTail:
        """Add `delta`, the output of the layer before, to `residual`, and compute the attention.

        Both are `[num_tokens, hidden_size]`; `residual` changes in place. An output is this rank's
        part of a sum if the norm sums over a group, and None if `residual` has it already.
        """
        rows = self.attention_rows(residual, delta)
        return LayerTail(residual, self.attention.heads(rows, rotation, attention))

    def attention_rows(self, residual: torch.Tensor, delta: Delta) -> Rows:
        """Add `delta` to `residual`, in place, and return the input of the attention."""
        return self.attention_norm.rows_for(residual, delta, self.attention)

    def mlp_output(self, residual: torch.Tensor, delta: Delta) -> torch.Tensor:
        """Add `delta` to `residual`, in place, and return this rank's part of the MLP's output."""
        return self.mlp.partial(self._mlp_norm.rows_for(residual, delta, self.mlp))

    def finish(self, tail: LayerTail) -> Delta:
        """Return the layer's output for tokens that `attend` has returned, or some of these.

        It is as `attend` takes that of the layer before. Their `residual` changes in place.
        """
        rows = self._mlp_norm.rows_for(tail.residual, self._attended(tail), self.mlp)
        mlp_post_norm = self._post_norms[1]
        if self._adds_products and mlp_post_norm is None:
            return self.mlp.forward_residual(tail.residual, rows)
        return self._scaled_sum(self.mlp.partial(rows), mlp_post_norm)

    def _attended(self, tail: LayerTail) -> Delta:
        """Return the output of the attention, as `finish` returns that of the layer."""
        post_norm = self._post_norms[0]
        if self._adds_products and post_norm is None:
            return self.attention.forward_residual(tail.residual, tail.heads)
        return self._scaled_sum(self.attention.partial(tail.heads), post_norm)

    def _scaled_sum(self, part: torch.Tensor, post_norm: FusedNorm | None) -> Delta:
        """Return a rank's part of an output, scaled; with a norm, the sum of the parts."""
        if post_norm is not None:
            part = self._group.all_reduce(part)
        if self._scale != 1.0:
            part = part.mul_(self._scale)
        return part if post_norm is None else NormedDelta(part, post_norm)


class FusedTwoMixerLayer(FusedLayer):
    """The fused form of `TwoMixerDecoderLayer`."""

    def __init__(self, layer: TwoMixerDecoderLayer, group: ParallelGroup, *, is_last: bool) -> None:
        super().__init__(layer, group, is_last=is_last)
        self._recurrence = FusedRecurrence(layer.recurrence)

    def attend(
        self, residual: torch.Tensor, delta: Delta, rotation: Rotation, attention: StepAttention
    ) -> LayerTail:
        normed = self.attention_norm(residual, delta)
        heads = self.attention.heads(normed, rotation, attention)
        # Last, since graphs end at attention.
        return LayerTail(residual, heads, self._recurrence.heads(normed, rotation, attention))

    def _attended(self, tail: LayerTail) -> Delta:
        assert tail.other is not None
        part = self.attention.partial(tail.heads).add_(self._recurrence.partial(tail.other))
        return self._scaled_sum(part, None)


class FusedParallelLayer(FusedLayer):
    """The fused form of `ParallelDecoderLayer`."""

    def attend(
        self, residual: torch.Tensor, delta: Delta, rotation: Rotation, attention: StepAttention
    ) -> LayerTail:
        normed = self.attention_norm(residual, delta)
        return LayerTail(residual, self.attention.heads(normed, rotation, attention), normed)

    def finish(self, tail: LayerTail) -> Delta:
        assert tail.other is not None
        part = self.attention.partial(tail.heads).add_(self.mlp.partial(tail.other))
        return self._scaled_sum(part, None)


class _Branch:
    """Runs a function beside others in a captured graph, where both use a part of the GPU."""

    def __init__(self, device: torch.device, *, is_used: bool) -> None:
        self._stream = _side_stream(device) if is_used and device.type == "cuda" else None

    @contextmanager
    def beside(self, function: Callable[[], Choice]) -> Iterator[Choice]:
        """Run the function, beside the kernels that are launched within the context."""
        stream = self._stream
        if stream is None or not torch.cuda.is_current_stream_capturing():
            yield function()
            return
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            result = function()
        yield result
        main.wait_stream(stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class FusedScaledLayer(FusedLayer):
    """The fused form of `ScaledDecoderLayer`."""

    def __init__(self, layer: ScaledDecoderLayer, group: ParallelGroup, *, is_last: bool) -> None:
        super().__init__(layer, group, is_last=is_last)
        self._side_experts, self._embedding_input = layer.side_experts, layer.embedding_input
        self._embedding_norm = FusedNorm(
            None if layer.embedding_input is None else layer.embedding_input.norm,
            overlaps=group.size == 1,
        )
        self._sum = FusedNorm(None)
        self._branch = _Branch(layer.scale.value.device, is_used=group.size == 1)
        self._layer_scale = layer.scale.value

    def finish(self, tail: LayerTail) -> NormedDelta:
        residual = tail.residual
        attention_norm, mlp_norm = self._post_norms
        assert attention_norm is not None
        assert mlp_norm is not None
        all_reduce = self._group.all_reduce
        attended = NormedDelta(all_reduce(self.attention.partial(tail.heads)), attention_norm)
        side = self._side_experts
        if side is None:
            delta = NormedDelta(all_reduce(self.mlp_output(residual, attended)), mlp_norm)
        else:
            norms = side.norm, side.router_norm
            rows, expert_rows, router_rows = self._mlp_norm.with_others(residual, attended, norms)
            # The rows of the router must not be freed before its kernels have ended.
            with self._branch.beside(partial(side.experts.choose, router_rows)) as choice:
                output = all_reduce(self.mlp.partial(rows))
            others = all_reduce(side.experts.partial(expert_rows, choice))
            delta = NormedDelta(output, mlp_norm, (others, side.mlp_norm, side.post_norm))
        if self._embedding_input is not None:
            assert tail.other is not None
            self._sum(residual, delta)
            output = self._embedding_input.projected(residual, tail.other)
            delta = NormedDelta(output, self._embedding_norm)
        return replace(delta, scale=self._layer_scale)


class FusedLayers:
    """All layers of a decoder, and its last norm."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        last_norm: Norm,
        config: ModelConfig,
        group: ParallelGroup,
        taps: Taps | None = None,
    ) -> None:
        """The weights must be final. `taps` keep the inputs of layers."""
        self.layers = [_fused_layer(layer, group, is_last=layer is layers[-1]) for layer in layers]
        self._norm = FusedNorm(
            last_norm, sums_over=_summed_by_norm(layers[-1], group), overlaps=group.size == 1
        )
        self._group = group
        self._taps = taps
        self._has_batches = _has_two_batches(layers, config, group)
        recurrent = config.recurrent.layers if config.recurrent is not None else ()
        self._num_cached = max(*config.cached_layers, *recurrent, 0) + 1
        """Number of layers up to the last one with keys and values, or a state."""

    def run(
        self,
        residual: torch.Tensor,
        embeddings: torch.Tensor | None,
        rotations: Iterable[Rotation],
        attention: StepAttention,
        last_attention: SelectedAttention | None = None,
    ) -> LayerTail:
        """Run all layers up to the attention of the last layer.

        Only the tokens whose logits are computed need more: no attention reads the last output.
        `residual` is `[num_tokens, hidden_size]`, and changes in place. `embeddings` are those of
        layers, `[num_layers, num_tokens, size]`, if they have any. `last_attention` overrides the
        attention of the last layer; then the result has the selected tokens alone, which pass the
        layers without keys and values alone, too.
        """
        delta: Delta = None
        all_rotations = list(rotations)
        for index, (layer, rotation) in enumerate(zip(self.layers, all_rotations, strict=True)):
            self._group.progress.enter(Phase.LAYER, index)
            if index == self._num_cached and last_attention is not None:
                assert isinstance(delta, NormedDelta)
                return self._run_selected(
                    residual, delta, embeddings, all_rotations, last_attention
                )
            is_last = layer is self.layers[-1]
            step = last_attention if is_last and last_attention is not None else attention
            tail = layer.attend(residual, delta, rotation, step)
            if self._taps is not None:
                self._taps.keep(index, residual)
            if embeddings is not None:
                tail = replace(tail, other=embeddings[index])
            if is_last:
                return _selected_tail(tail, last_attention)
            delta = layer.finish(tail)
        raise AssertionError("A decoder has layers.")

    def _run_selected(
        self,
        residual: torch.Tensor,
        delta: NormedDelta,
        embeddings: torch.Tensor | None,
        rotations: Sequence[Rotation],
        attention: SelectedAttention,
    ) -> LayerTail:
        """Run the layers without keys and values for the selected tokens, as `run` does."""
        indices = attention.indices
        residual = residual.index_select(0, indices)
        pending: Delta = delta.select(indices)
        if not len(residual):
            # Kernels take at least one row.
            return LayerTail(residual, residual)
        if embeddings is not None:
            embeddings = embeddings.index_select(1, indices)
        selected = {rotation: rotation.select(indices) for rotation in dict.fromkeys(rotations)}
        rows = SelectedRows(attention)
        for index in range(self._num_cached, len(self.layers)):
            self._group.progress.enter(Phase.LAYER, index)
            layer, rotation = self.layers[index], selected[rotations[index]]
            assert rotation is not None
            tail = layer.attend(residual, pending, rotation, rows)
            if embeddings is not None:
                tail = replace(tail, other=embeddings[index])
            if layer is not self.layers[-1]:
                pending = layer.finish(tail)
        return tail

    def overlaps(self, num_tokens: int) -> bool:
        """Return whether `run_two_batches` takes less time for this number of tokens."""
        return self._has_batches and _overlaps(self._group, num_tokens)

    def run_two_batches(
        self,
        residual: torch.Tensor,
        rotations: Iterable[Rotation],
        attention: StepAttention,
        last_attention: SelectedAttention | None = None,
    ) -> LayerTail:
        """Return what `run` does; two halves of the tokens take turns.

        While the ranks sum the output of a product over one half, they compute the other half. Only
        attention is computed for all tokens at once, as those of a prompt may be in both halves.
        Systems that serve experts hide what ranks exchange behind a second batch in the same way
        (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024).
        """
        num_tokens = len(residual)
        first = _first_half(num_tokens)
        sizes = (first, num_tokens - first)
        streams = residual.split(sizes)
        deltas: Sequence[Delta] = (None, None)
        begin_sum = self._group.begin_all_reduce
        for index, (layer, rotation) in enumerate(zip(self.layers, rotations, strict=True)):
            self._group.progress.enter(Phase.LAYER, index)
            is_last = layer is self.layers[-1]
            assert isinstance(layer.attention, FusedAttention)
            batches = map(layer.attention_rows, streams, deltas)
            heads = layer.attention.heads_of_batches(
                batches,
                sizes,
                rotation,
                (last_attention or attention) if is_last else attention,
                residual.new_empty(num_tokens, layer.attention.num_columns),
            )
            if self._taps is not None:
                self._taps.keep(index, residual)
            if is_last:
                return _selected_tail(LayerTail(residual, heads), last_attention)
            # The sums of both halves are begun before the first is finished, and the sum of one
            # half before the other half is computed.
            sums = [begin_sum(layer.attention.partial(part)) for part in heads.split(sizes)]
            deltas = [
                begin_sum(layer.mlp_output(stream, pending))
                for stream, pending in zip(streams, sums, strict=True)
            ]
        raise AssertionError("A decoder has layers.")

    def finish(self, tail: LayerTail) -> torch.Tensor:
        """Return the normed hidden states of tokens that `run` returned, or some of these.

        They are `[num_tokens, hidden_size]`. The tensors of `tail` may change in place.
        """
        if not len(tail.residual):
            return tail.residual
        normed = self._norm(tail.residual, self.layers[-1].finish(tail))
        if self._taps is not None:
            self._taps.keep(len(self.layers), tail.residual)
        return normed


def _selected_tail(tail: LayerTail, attention: SelectedAttention | None) -> LayerTail:
    """Return the selected tokens of a tail whose attention is that of these tokens, if any are."""
    return tail if attention is None else tail.select_residual(attention.indices)


def _fused_layer(layer: DecoderLayer, group: ParallelGroup, *, is_last: bool) -> FusedLayer:
    """Return the fused form of a layer."""
    if isinstance(layer, ScaledDecoderLayer):
        return FusedScaledLayer(layer, group, is_last=is_last)
    if isinstance(layer, TwoMixerDecoderLayer):
        return FusedTwoMixerLayer(layer, group, is_last=is_last)
    fused = FusedParallelLayer if isinstance(layer, ParallelDecoderLayer) else FusedLayer
    return fused(layer, group, is_last=is_last)


def reserve_sums(
    layers: Sequence[DecoderLayer], config: ModelConfig, group: ParallelGroup, max_num_tokens: int
) -> None:
    """Have the group allocate memory for the sums of two batches, if steps of this size have them.

    Call it before the group is joined.
    """
    if _has_two_batches(layers, config, group) and _overlaps(group, max_num_tokens):
        group.max_begun_rows = _first_half(max_num_tokens)


def _summed_by_norm(layer: DecoderLayer, group: ParallelGroup) -> ParallelGroup | None:
    """Return the group if the norm behind a layer sums the parts of that layer's output."""
    return group if layer.mlp_post_norm is None else None


def _has_two_batches(
    layers: Sequence[DecoderLayer], config: ModelConfig, group: ParallelGroup
) -> bool:
    """Return whether steps of two batches may be faster.

    Experts would be read twice, norms of outputs need whole sums, other formats than fp8 would be
    dequantized for each half, and a state needs the tokens of a sequence in order.
    """
    is_read_once = config.quantization is None or config.quantization.is_fp8
    return (
        group.size > 1
        and is_read_once
        and all(
            not isinstance(layer, (ParallelDecoderLayer, TwoMixerDecoderLayer))
            and isinstance(layer.attention, DecoderSelfAttention)
            and isinstance(layer.mlp, MLP)
            and layer.residual_scale == 1.0
            and layer.attention_norm is not None
            and layer.mlp_norm is not None
            and layer.attention_post_norm is None
            and layer.mlp_post_norm is None
            for layer in layers
        )
    )


def _overlaps(group: ParallelGroup, num_tokens: int) -> bool:
    return group.overlaps_sums and num_tokens >= _MIN_TOKENS


def _first_half(num_tokens: int) -> int:
    """Return the tokens of the first half, which has at least as many as the second."""
    return -(-num_tokens // (2 * _TILE_ROWS)) * _TILE_ROWS
