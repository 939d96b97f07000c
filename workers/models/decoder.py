"""One decoder for every family; what differs between them is data in `ModelConfig`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase
from pagedray.rank_roofline import WeightWork
from workers.layers.embedding import ParallelHead, VocabEmbedding
from workers.layers.rope import NoRotation, RotaryEmbedding, Rotation
from workers.layers.weight import CompositeLayer, Placement
from workers.models.decoder_layer import (
    DecoderLayer,
    ParallelDecoderLayer,
    TwoMixerDecoderLayer,
    make_norm,
)
from workers.models.fused_layers import FusedLayers, LayerTail, reserve_sums
from workers.models.scaled_layer import LayerEmbeddings, ScaledDecoderLayer
from workers.models.score_head import ScoreHead
from workers.models.self_attention import CachedAttention, SelectedAttention, StepAttention
from workers.parallel.group import ParallelGroup, SoloGroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attention.abstract import AttentionBackend, AttentionMetadata
    from pagedray.model_config import ModelConfig
    from workers.layers.norm import Norm
    from workers.layers.sharded_logits import ShardedLogits
    from workers.models.draft_head import Taps

__all__ = ["Decoder"]


class Decoder(CompositeLayer):
    """One rank's part of a decoder-only model. Call `load_weights` before the first forward."""

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        device: torch.device,
        fuses: bool | None = None,
    ) -> None:
        """`fuses`: run fused layers instead of the plain ones; None is for CPUs and CUDA."""
        dtype = getattr(torch, config.dtype)
        names = config.names
        self.config = config
        self.dtype: torch.dtype = dtype
        self.device = device
        self._progress = group.progress
        place = Placement(group, dtype, device, config.quantization, backend)
        self._embedding = _make_embedding(config, place)
        self._embedding_norm = None
        if names.embedding_norm is not None:
            self._embedding_norm = make_norm(names.embedding_norm, config, place)
        self._rotations = _LayerRotations(
            config, num_query_heads=config.num_heads // group.size, dtype=dtype, device=device
        )
        self._layer_embeddings = None
        if config.layer_embedding is not None:
            self._layer_embeddings = LayerEmbeddings(config, config.layer_embedding, place)
        layer_class = _layer_class(config)
        self._layers = [layer_class(config, index, place) for index in range(config.num_layers)]
        self._norm = make_norm(names.final_norm, config, place)
        self._group = group
        self._fuses = device.type in ("cpu", "cuda") if fuses is None else fuses
        self._fused: FusedLayers | None = None
        self._taps: Taps | None = None
        self._head = None
        self._score_head = None
        if config.task == "score":
            self._score_head = ScoreHead(config, place)
        if not config.pools:
            self._head = _make_head(config, place, self._embedding)

    def prepare_steps(self, max_num_tokens: int) -> None:
        """Prepare steps of up to so many tokens. Call it before the group is joined."""
        if self._fuses:
            reserve_sums(self._layers, self.config, self._group, max_num_tokens)

    def finalize(self) -> None:
        super().finalize()
        if self._fuses:
            taps = self._taps
            self._fused = FusedLayers(self._layers, self._norm, self.config, self._group, taps)

    def tap_layers(self, taps: Taps) -> None:
        """Have each step keep the inputs of some layers. Call it before weights are loaded."""
        self._taps = taps

    @property
    def finishes_all(self) -> bool:
        """Whether steps compute the last hidden state of all tokens."""
        return self._taps is not None and self.config.num_layers in self._taps.layers

    @property
    def last_norm(self) -> Norm:
        """The norm of the last hidden states."""
        return self._norm

    @property
    def embedding(self) -> VocabEmbedding:
        """The embedding of tokens."""
        return self._embedding

    @property
    def fused(self) -> FusedLayers:
        """The fused layers, which must be there."""
        assert self._fused is not None
        return self._fused

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        logits_indices: torch.Tensor | None,
        last_attention: SelectedAttention | None = None,
    ) -> torch.Tensor:
        """Return the normed hidden states of some tokens, `[num_sampled, hidden_size]`.

        `token_ids` and `positions` are `[num_tokens]` int64. `logits_indices`, `[num_sampled]`
        int64, selects the tokens whose logits are computed; None selects all. `last_attention`
        computes the attention of the last layer for the selected tokens alone, if given, and so of
        the layers before it that have no keys and values.
        """
        residual = self._embedded(token_ids)
        embeddings = self._embedded_by_layer(token_ids, residual)
        rotations = self._rotations.rotations(positions)
        fused = self._fused
        if fused is None:
            hidden = self._run_plainly(residual, embeddings, rotations, attention)
            return hidden if logits_indices is None else hidden[logits_indices]
        if fused.overlaps(len(residual)):
            tail = fused.run_two_batches(residual, rotations, attention, last_attention)
        else:
            tail = fused.run(residual, embeddings, rotations, attention, last_attention)
        if logits_indices is None or last_attention is not None:
            return fused.finish(tail)
        if self.finishes_all:
            return fused.finish(tail).index_select(0, logits_indices)
        return fused.finish(tail.select(logits_indices))

    def encode_texts(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return the normed hidden states of whole texts, `[num_tokens, hidden_size]`.

        As `forward`, but without a KV cache.
        """
        no_cache = torch.empty(0, dtype=self.dtype, device=self.device)
        return self.forward(token_ids, positions, CachedAttention(no_cache, metadata), None)

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores of texts, `[num_texts, 1]` float32, from their last hidden states.

        `vectors` is `[num_texts, hidden_size]`. Only for a model that scores.
        """
        assert self._score_head is not None
        return self._score_head(vectors.to(self.dtype))

    def run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention
    ) -> LayerTail:
        """Run the fused layers up to the attention of the last layer."""
        residual = self._embedded(token_ids)
        embeddings = self._embedded_by_layer(token_ids, residual)
        rotations = self._rotations.rotations(positions)
        return self.fused.run(residual, embeddings, rotations, attention)

    def _run_plainly(
        self,
        x: torch.Tensor,
        embeddings: torch.Tensor | None,
        rotations: Iterable[Rotation],
        attention: StepAttention,
    ) -> torch.Tensor:
        for index, (layer, rotation) in enumerate(zip(self._layers, rotations, strict=True)):
            self._progress.enter(Phase.LAYER, index)
            embedding = None if embeddings is None else embeddings[index]
            if self._taps is not None:
                self._taps.keep(index, x)
            x = layer(x, rotation, attention, embedding)
        if self._taps is not None:
            self._taps.keep(len(self._layers), x)
        return self._norm(x)

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        residual = self._embedding(token_ids)
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        return residual

    def _embedded_by_layer(
        self, token_ids: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the embeddings of layers, `[num_layers, num_tokens, size]`, or None."""
        if self._layer_embeddings is None:
            return None
        return self._layer_embeddings(token_ids, residual)

    def logits(self, hidden: torch.Tensor) -> ShardedLogits:
        """Return the logits of `[num_sampled, hidden_size]`; only if the model generates."""
        assert self._head is not None
        self._progress.enter(Phase.LOGITS)
        return self._head(hidden)

    def body_work(self) -> WeightWork:
        """Return what the weights that all tokens are multiplied by cost a step."""
        others = (self._head, self._norm)
        layers = (layer for layer in self.sublayers() if layer not in others)
        work = sum((layer.weight_work() for layer in layers), WeightWork())
        return work - self._layers[-1].tail_work()

    def sampled_work(self) -> WeightWork:
        """Return what all other weights cost a step, which only tokens with logits need."""
        assert self._head is not None
        work = self._layers[-1].tail_work() + self._norm.weight_work()
        return work + self._head.weight_work()


def _layer_class(config: ModelConfig) -> type[DecoderLayer]:
    if config.names.layer_scale is not None:
        return ScaledDecoderLayer
    if config.recurrent is not None and config.recurrent.is_beside_attention:
        return TwoMixerDecoderLayer
    return ParallelDecoderLayer if config.has_parallel_mlp else DecoderLayer


def _make_embedding(config: ModelConfig, place: Placement) -> VocabEmbedding:
    if not config.has_tied_embeddings:
        # A table on every rank costs memory and saves an all-reduce a step.
        place = replace(place, group=SoloGroup())
    return VocabEmbedding(
        config.names.embedding,
        config.vocab_size,
        config.hidden_size,
        place,
        scale=config.embedding_scale,
    )


class _LayerRotations:
    """Each rotary embedding of a model, made once and shared by the layers that use it.

    Models with ALiBi have none: their attention adds a bias by distance.
    """

    def __init__(
        self, config: ModelConfig, *, num_query_heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        of_layers = [
            (config.rope_of(layer), config.heads_of(layer).head_size)
            for layer in range(config.num_layers)
        ]
        ropes = list(dict.fromkeys(of_layers))
        self._indices = [ropes.index(rope) for rope in of_layers]
        self._embeddings = [
            RotaryEmbedding(
                rope,
                head_size=head_size,
                num_query_heads=num_query_heads,
                max_positions=config.max_positions,
                dtype=dtype,
                device=device,
            )
            if rope is not None
            else None
            for rope, head_size in ropes
        ]

    def rotations(self, positions: torch.Tensor) -> Iterator[Rotation]:
        """Yield each layer's rotation to these positions, `[num_tokens]` int64."""
        rotations = [
            NoRotation() if embedding is None else embedding.rotation_at(positions)
            for embedding in self._embeddings
        ]
        for index in self._indices:
            yield rotations[index]


def _make_head(config: ModelConfig, place: Placement, embedding: VocabEmbedding) -> ParallelHead:
    return ParallelHead(
        "lm_head",
        config.vocab_size,
        config.hidden_size,
        place,
        soft_cap=config.logit_soft_cap,
        scale=config.logit_scale,
        tied_to=embedding if config.has_tied_embeddings else None,
    )
