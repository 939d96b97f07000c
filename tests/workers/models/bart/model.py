"""BART: an encoder, and a decoder that attends to it through the paged cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attention.abstract import AttentionBackend, AttentionMetadata, AttentionSpec, AttentionType
from tests.workers.models.bart.config import BartConfig
from tests.workers.models.bart.layers import (
    BartDecoderLayer,
    BartEncoderLayer,
    attention_params,
    layer_norm,
)
from workers.layers.embedding import ParallelHead, PositionEmbedding, VocabEmbedding
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard
from workers.parallel.group import ParallelGroup

# The first rows of the position tables are reserved for padding.
_POSITION_OFFSET = 2


def bart_spec(
    config: BartConfig, group: ParallelGroup, *, block_size: int, device: torch.device
) -> AttentionSpec:
    """Return what the attention backend must support on this rank."""
    encoder, *decoder = (
        attention_params(config, kind, group)
        for kind in (AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER)
    )
    return AttentionSpec(
        layers=(encoder,) * config.encoder.num_layers + tuple(decoder) * config.decoder.num_layers,
        dtype=getattr(torch, config.dtype),
        device=device,
        block_size=block_size,
    )


class Bart(CompositeLayer):
    """One rank's part of a model. Fill its shards and call `finalize` before the first forward."""

    def __init__(
        self,
        config: BartConfig,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        device: torch.device,
    ) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        placement = Placement(group, dtype, device, backend=backend)
        self.config = config
        self.dtype = dtype
        self.device = device
        self._words = VocabEmbedding(
            "model.shared", config.vocab_size, config.hidden_size, placement
        )
        self._word_scale = math.sqrt(config.hidden_size) if config.has_scaled_embedding else 1.0
        self._encoder_input = _Input("model.encoder", config, placement)
        self._encoder_layers = [
            BartEncoderLayer(f"model.encoder.layers.{i}", config, i, placement)
            for i in range(config.encoder.num_layers)
        ]
        self._decoder_input = _Input("model.decoder", config, placement)
        self._decoder_layers = [
            BartDecoderLayer(
                f"model.decoder.layers.{i}",
                config,
                config.encoder.num_layers + 2 * i,
                placement,
            )
            for i in range(config.decoder.num_layers)
        ]
        self._head = ParallelHead(
            "model.shared",
            config.vocab_size,
            config.hidden_size,
            placement,
            tied_to=self._words,
        )
        self._logits_bias = _LogitsBias(config.vocab_size, device)

    def encode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the encoder's hidden states, `[num_encoder_tokens, hidden_size]`.

        `token_ids` and `positions`, int64, are those of the encoder tokens of the step.
        """
        hidden = self._encoder_input(self._embedded(token_ids), positions)
        for layer in self._encoder_layers:
            hidden = layer(hidden, kv_cache, metadata)
        return hidden

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        encoded: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return the decoder's hidden states, `[num_tokens, hidden_size]`.

        `encoded` is what `encode` returned for the same step, or None if it has no encoder
        tokens: later steps find their keys and values in the cache.
        """
        hidden = self._decoder_input(self._embedded(token_ids), positions)
        for layer in self._decoder_layers:
            hidden = layer(hidden, encoded, kv_cache, metadata)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, vocab_size]` float32, the same on every rank."""
        return self._head(hidden).whole() + self._logits_bias.row

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        words = self._words(token_ids)
        return words if self._word_scale == 1.0 else words.mul_(self._word_scale)

    def sublayers(self) -> Iterator[Layer]:
        yield self._words
        yield self._encoder_input
        yield from self._encoder_layers
        yield self._decoder_input
        yield from self._decoder_layers
        yield self._head
        yield self._logits_bias


class _Input(CompositeLayer):
    """The input of a stack: token and position embeddings, added and normed."""

    def __init__(self, name: str, config: BartConfig, placement: Placement) -> None:
        self._positions = PositionEmbedding(
            f"{name}.embed_positions.weight",
            _POSITION_OFFSET + config.max_positions,
            config.hidden_size,
            placement,
        )
        self._norm = layer_norm(f"{name}.layernorm_embedding", config, placement)

    def __call__(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        return self._norm(words + self._positions(positions + _POSITION_OFFSET))

    def sublayers(self) -> Iterator[Layer]:
        yield self._positions
        yield self._norm


class _LogitsBias(Layer):
    """A bias that is added to the logits, the same on every rank."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.row = torch.empty(1, vocab_size, dtype=torch.float32, device=device)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard(
            name="final_logits_bias",
            shape=tuple(self.row.shape),
            part=(slice(None), slice(None)),
            target=self.row,
        )
