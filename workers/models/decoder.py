"""One decoder for every family; what differs between them is data in `ModelConfig`.

`ResidualNorm` adds to the residual stream and norms it, so that one kernel can do both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.rank_progress import Phase
from pagedray.rank_roofline import WeightWork
from workers.layers.embedding import ParallelHead, VocabEmbedding
from workers.layers.weight import CompositeLayer
from workers.models.decoder_layer import decoder_layer_class, summed_by_norm
from workers.models.halved_layers import HalvedLayers
from workers.models.norm_factory import make_norm
from workers.models.rotations import LayerRotations
from workers.models.score_head import ScoreHead
from workers.models.step_attention import CachedAttention
from workers.parallel.group import SoloGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attention.abstract import AttentionBackend, AttentionMetadata
    from pagedray.model_config import ModelConfig
    from workers.layers.sharded_logits import ShardedLogits
    from workers.layers.weight import Layer
    from workers.models.attended import Attended
    from workers.models.decoder_layer import DecoderLayer
    from workers.models.step_attention import SelectedAttention, StepAttention
    from workers.parallel.group import ParallelGroup

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
    ) -> None:
        dtype = getattr(torch, config.dtype)
        names = config.names
        self.config = config
        self.dtype: torch.dtype = dtype
        self.device = device
        self._progress = group.progress
        self._embedding = _make_embedding(config, group, dtype=dtype, device=device)
        self._embedding_norm = None
        if names.embedding_norm is not None:
            self._embedding_norm = make_norm(
                names.embedding_norm, config, group, dtype=dtype, device=device
            )
        self._rotations = LayerRotations(
            config, num_query_heads=config.num_heads // group.size, dtype=dtype, device=device
        )
        layer_class = decoder_layer_class(config)
        self._layers = [
            layer_class(config, index, group, backend=backend, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]
        self._halves = _halved_layers(self._layers, config, group)
        self._norm = make_norm(
            names.final_norm,
            config,
            group,
            dtype=dtype,
            device=device,
            sums_over=summed_by_norm(config, group),
        )
        self._head = None
        self._score_head = None
        if config.task == "score":
            self._score_head = ScoreHead(config, dtype=dtype, device=device)
        if not config.pools:
            self._head = _make_head(config, group, self._embedding, dtype=dtype, device=device)

    def prepare_steps(self, max_num_tokens: int) -> None:
        """Prepare steps of up to so many tokens. Call it before the group is joined."""
        if self._halves is not None:
            self._halves.prepare_steps(max_num_tokens)

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
        computes the attention of the last layer for the selected tokens alone, if given.
        """
        halves = self._halves
        if halves is not None and halves.takes(len(token_ids)):
            residual = self._embedded(token_ids)
            rotations = self._rotations.rotations(positions)
            attended = halves.run(residual, rotations, attention, last_attention)
        else:
            attended = self.run_layers(token_ids, positions, attention, last_attention)
        if logits_indices is not None:
            if last_attention is None:
                attended = attended.select(logits_indices)
            else:
                attended = attended.select_beside(logits_indices)
        return self.finish(attended)

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
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        last_attention: SelectedAttention | None = None,
    ) -> Attended:
        """Run all layers but what follows the attention of the last one.

        Only the tokens whose logits are computed need that: no attention reads what it returns.
        `last_attention` is that of the last layer, if another one than that of the others.
        """
        residual = self._embedded(token_ids)
        delta = None
        rotations = self._rotations.rotations(positions)
        for index, (layer, rotation) in enumerate(zip(self._layers, rotations, strict=True)):
            self._progress.enter(Phase.LAYER, index)
            is_last = layer is self._layers[-1]
            if is_last and last_attention is not None:
                attention = last_attention
            attended = layer.attend(residual, delta, rotation, attention)
            if not is_last:
                delta = layer.finish(attended)
        return attended

    def finish(self, attended: Attended) -> torch.Tensor:
        """Return the normed hidden states of tokens that `run_layers` returned, or some of these.

        They are `[num_tokens, hidden_size]`. The tensors of `attended` may change in place.
        """
        if not len(attended.residual):
            return attended.residual
        return self._norm(attended.residual, self._layers[-1].finish(attended))

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        residual = self._embedding(token_ids)
        if self._embedding_norm is not None:
            residual = self._embedding_norm(residual)
        return residual

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
        return work - self._layers[-1].finish_work()

    def sampled_work(self) -> WeightWork:
        """Return what all other weights cost a step, which only tokens with logits need."""
        assert self._head is not None
        work = self._layers[-1].finish_work() + self._norm.weight_work()
        return work + self._head.weight_work()

    def sublayers(self) -> Iterator[Layer]:
        yield self._embedding
        if self._embedding_norm is not None:
            yield self._embedding_norm
        yield from self._layers
        yield self._norm
        if self._head is not None:
            yield self._head
        if self._score_head is not None:
            yield self._score_head


def _make_embedding(
    config: ModelConfig, group: ParallelGroup, *, dtype: torch.dtype, device: torch.device
) -> VocabEmbedding:
    return VocabEmbedding(
        config.names.embedding,
        config.vocab_size,
        config.hidden_size,
        scale=config.embedding_scale,
        # A table on every rank costs memory and saves an all-reduce a step.
        group=group if config.has_tied_embeddings else SoloGroup(),
        dtype=dtype,
        device=device,
    )


def _halved_layers(
    layers: Sequence[DecoderLayer], config: ModelConfig, group: ParallelGroup
) -> HalvedLayers | None:
    """Return what runs all layers on halves of a step; None if that would not be faster."""
    if group.size == 1:
        return None
    # Other formats would be dequantized for each half.
    if config.quantization is not None and not config.quantization.is_fp8:
        return None
    halves = [half for layer in layers if (half := layer.halved()) is not None]
    return HalvedLayers(halves, group) if len(halves) == len(layers) else None


def _make_head(
    config: ModelConfig,
    group: ParallelGroup,
    embedding: VocabEmbedding,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> ParallelHead:
    return ParallelHead(
        "lm_head",
        config.vocab_size,
        config.hidden_size,
        soft_cap=config.logit_soft_cap,
        scale=config.logit_scale,
        group=group,
        tied_to=embedding if config.has_tied_embeddings else None,
        quantization=config.quantization,
        dtype=dtype,
        device=device,
    )
