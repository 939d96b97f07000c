"""BERT (Devlin et al. 2018): an encoder with norms after the additions (post-norm).

RoBERTa (Liu et al. 2019) has the same layers, and other positions: see `text_positions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.abstract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from attention.layer import Attention
from pagedray.rank_progress import Phase
from workers.layers.embedding import PositionEmbedding, VocabEmbedding
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.mlp import MLPParams, PlainMLP
from workers.layers.norm import LayerNorm
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard, part_of
from workers.models.fused_norm import FusedNorm
from workers.models.score_head import ScoreHead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import ModelConfig
    from workers.parallel.group import ParallelGroup

__all__ = ["Bert", "EncoderSelfAttention", "ProjectionNames", "encoder_spec"]


def encoder_spec(
    config: ModelConfig, group: ParallelGroup, *, block_size: int, device: torch.device
) -> AttentionSpec:
    """Return what the attention backend must support on this rank."""
    return AttentionSpec(
        layers=(_attention_params(config, group),) * config.num_layers,
        dtype=getattr(torch, config.dtype),
        device=device,
        block_size=block_size,
    )


class Bert(CompositeLayer):
    """One rank's part of an encoder. Call `load_weights` before the first forward."""

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        device: torch.device,
    ) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        place = Placement(group, dtype, device, backend=backend)
        prefix = config.names.encoder
        self.config = config
        self.dtype = dtype
        self.device = device
        self._progress = group.progress
        self._words = VocabEmbedding(
            f"{prefix}.embeddings.word_embeddings", config.vocab_size, config.hidden_size, place
        )
        self._positions = PositionEmbedding(
            f"{prefix}.embeddings.position_embeddings.weight",
            _num_position_rows(config),
            config.hidden_size,
            place,
        )
        self._token_types = _TokenTypes(config, place)
        self._norm = _norm(f"{prefix}.embeddings.LayerNorm", config, place)
        self._layers = [_BertLayer(config, index, place) for index in range(config.num_layers)]
        self._head = None
        if config.task == "score":
            self._head = ScoreHead(config, place)
        self._no_cache = torch.empty(0, dtype=dtype, device=device)

    def encode_texts(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        token_types: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens, `[num_tokens, hidden_size]`.

        The others are `[num_tokens]` int64. Without `token_types` all are of type 0.
        """
        words = self._words(token_ids).add_(self._token_types(token_types))
        hidden = self._norm(words.add_(self._positions(positions)))
        for index, layer in enumerate(self._layers):
            self._progress.enter(Phase.LAYER, index)
            hidden = layer(hidden, self._no_cache, metadata)
        return hidden

    def scores(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the scores of texts, `[num_texts, 1]` float32, from their first hidden states.

        `vectors` is `[num_texts, hidden_size]`. Only for a model that scores.
        """
        assert self._head is not None
        return self._head(vectors.to(self.dtype))


class _TokenTypes(Layer):
    """The embeddings of token types 0 and 1, if the model has both."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self._name = f"{config.names.encoder}.embeddings.token_type_embeddings.weight"
        self._shape = (config.num_token_types, config.hidden_size)
        num_rows = min(config.num_token_types, 2)
        self._rows = torch.empty(
            num_rows, config.hidden_size, dtype=place.dtype, device=place.device
        )

    def __call__(self, token_types: torch.Tensor | None) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`, or `[1, hidden_size]` for all tokens."""
        return self._rows[:1] if token_types is None else self._rows[token_types]

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard(
            name=self._name,
            shape=self._shape,
            part=(slice(0, len(self._rows)), slice(None)),
            target=self._rows,
        )


class _BertLayer(CompositeLayer):
    """Attention and MLP, each added to its input, and normed."""

    def __init__(self, config: ModelConfig, index: int, place: Placement) -> None:
        name = f"{config.names.encoder}.encoder.layer.{index}"
        names = ProjectionNames(
            query=f"{name}.attention.self.query",
            key=f"{name}.attention.self.key",
            value=f"{name}.attention.self.value",
            output=f"{name}.attention.output.dense",
        )
        params = _attention_params(config, place.group)
        self._attention = EncoderSelfAttention(names, params, index, place)
        self._attention_norm = _norm(f"{name}.attention.output.LayerNorm", config, place)
        mlp_params = MLPParams(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=True,
        )
        self._mlp = PlainMLP(
            (f"{name}.intermediate.dense",), f"{name}.output.dense", mlp_params, place
        )
        self._mlp_norm = _norm(f"{name}.output.LayerNorm", config, place)
        self._add_norms = FusedNorm(self._attention_norm), FusedNorm(self._mlp_norm)

    def __call__(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`."""
        add_attention_norm, add_mlp_norm = self._add_norms
        hidden = add_attention_norm(hidden, self._attention(hidden, kv_cache, metadata))
        return add_mlp_norm(hidden, self._mlp(hidden))


def _num_position_rows(config: ModelConfig) -> int:
    padding_id = config.position_padding_id
    return config.max_positions + (0 if padding_id is None else padding_id + 1)


def _attention_params(config: ModelConfig, group: ParallelGroup) -> AttentionParams:
    params = AttentionParams(
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        attention_type=AttentionType.ENCODER_ONLY,
    )
    return params.shard(group.rank, group.size)


def _norm(name: str, config: ModelConfig, place: Placement) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.norm_eps, place, has_bias=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionNames:
    """The names in the checkpoint of the projections of one layer."""

    query: str
    key: str
    value: str
    output: str


class EncoderSelfAttention(CompositeLayer):
    """Multi-head attention (Vaswani et al. 2017); heads are sharded over the ranks."""

    def __init__(
        self, names: ProjectionNames, params: AttentionParams, layer_index: int, place: Placement
    ) -> None:
        """`params` are those of this rank; queries, keys and values have as many heads."""
        assert params.num_heads == params.num_kv_heads
        assert place.backend is not None
        self._size = params.num_heads * params.head_size
        hidden_size = self._size * place.group.size
        part = part_of(hidden_size, place.group)
        self._qkv = ColumnParallelLinear(
            hidden_size,
            [
                Columns(name=name, total=hidden_size, part=part)
                for name in (names.query, names.key, names.value)
            ],
            place,
            has_bias=True,
        )
        self._attend = Attention(params, layer_index=layer_index, backend=place.backend).forward
        self._output = RowParallelLinear(
            names.output, hidden_size, hidden_size, place, has_bias=True
        )

    def __call__(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`."""
        query, key, value = self._qkv(hidden).split(self._size, dim=1)
        return self._output(self._attend(query, key, value, kv_cache, metadata))
