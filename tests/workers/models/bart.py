"""Reads the shape of a BART model from `config.json`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from attention.abstract import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from attention.layer import Attention
from pagedray.model_config import Dtype
from workers.layers.embedding import ParallelHead, PositionEmbedding, VocabEmbedding
from workers.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from workers.layers.mlp import MLPParams, PlainMLP
from workers.layers.norm import LayerNorm
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard, part_of
from workers.models.bert import EncoderSelfAttention, ProjectionNames
from workers.models.config_json.config_file import ConfigFile
from workers.models.config_json.family import MAX_POSITIONS, model_dtype
from workers.parallel.group import ParallelGroup

_ARCHITECTURES = ("BartForConditionalGeneration", "BartModel")
_MAX_SIZE = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 1024
_NORM_EPS = 1e-5
# The first rows of the position tables are reserved for padding.
_POSITION_OFFSET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """The shape of the encoder's layers, or of the decoder's."""

    num_layers: int
    intermediate_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig:
    """The shape of an encoder and a decoder that share a vocabulary."""

    folder: Path
    """The checkpoint folder."""
    vocab_size: int
    hidden_size: int
    num_heads: int
    """Heads of every layer of both stacks: their keys share one cache."""
    max_positions: int
    encoder: StackConfig
    decoder: StackConfig
    has_scaled_embedding: bool
    """Whether embeddings of tokens are multiplied by the root of the hidden size."""
    dtype: Dtype
    first_token_id: int
    """The first token of the decoder."""
    eos_token_ids: tuple[int, ...]

    @property
    def head_size(self) -> int:
        """Return the size of a head."""
        return self.hidden_size // self.num_heads


def read_bart_config(folder: Path, *, dtype: Dtype | None = None) -> BartConfig:
    """Return the shape of the checkpoint in a folder; `dtype` overrides that of the file.

    Raises CheckpointError.
    """
    file = ConfigFile.read(folder / "config.json")
    architectures = file.words("architectures")
    if not set(architectures) & set(_ARCHITECTURES):
        raise file.rejection("architectures", f"must name one of {', '.join(_ARCHITECTURES)}")
    file.choice("activation_function", ("gelu",), "gelu")
    hidden_size = file.integer("d_model", most=_MAX_SIZE)
    num_heads = file.integer("decoder_attention_heads", most=_MAX_SIZE)
    if file.integer("encoder_attention_heads", most=_MAX_SIZE) != num_heads:
        raise file.rejection("encoder_attention_heads", f"must be {num_heads}, as in the decoder")
    if hidden_size % num_heads:
        raise file.rejection(
            "d_model", f"must be a multiple of {num_heads} heads, not {hidden_size}"
        )
    vocab_size = file.integer("vocab_size", most=_MAX_VOCAB)
    return BartConfig(
        folder=folder,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        max_positions=file.integer("max_position_embeddings", most=MAX_POSITIONS),
        encoder=_stack(file, "encoder"),
        decoder=_stack(file, "decoder"),
        has_scaled_embedding=file.flag("scale_embedding", False),
        dtype=dtype or model_dtype(file) or "float32",
        first_token_id=file.integer("decoder_start_token_id", 2, least=0, most=vocab_size - 1),
        eos_token_ids=file.token_ids("eos_token_id"),
    )


def _stack(file: ConfigFile, name: str) -> StackConfig:
    return StackConfig(
        num_layers=file.integer(f"{name}_layers", most=_MAX_LAYERS),
        intermediate_size=file.integer(f"{name}_ffn_dim", most=_MAX_SIZE),
    )


class BartEncoderLayer(CompositeLayer):
    """Self attention and MLP."""

    def __init__(
        self, name: str, config: BartConfig, layer_index: int, placement: Placement
    ) -> None:
        kind = AttentionType.ENCODER
        self._attention = _self_attention(name, config, layer_index, kind, placement)
        self._attention_norm = layer_norm(f"{name}.self_attn_layer_norm", config, placement)
        self._mlp = _mlp(name, config, config.encoder.intermediate_size, placement)
        self._mlp_norm = layer_norm(f"{name}.final_layer_norm", config, placement)

    def __call__(
        self, hidden: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """Return `[num_encoder_tokens, hidden_size]`."""
        hidden = self._attention_norm(hidden + self._attention(hidden, kv_cache, metadata))
        return self._mlp_norm(hidden + self._mlp(hidden))

    def sublayers(self) -> Iterator[Layer]:
        yield self._attention
        yield self._attention_norm
        yield self._mlp
        yield self._mlp_norm


class BartDecoderLayer(CompositeLayer):
    """Self attention, attention to the encoder's tokens, and MLP."""

    def __init__(
        self, name: str, config: BartConfig, layer_index: int, placement: Placement
    ) -> None:
        """`layer_index` is that of self attention; cross attention has the one after it."""
        kind = AttentionType.DECODER
        self._attention = _self_attention(name, config, layer_index, kind, placement)
        self._attention_norm = layer_norm(f"{name}.self_attn_layer_norm", config, placement)
        self._cross = CrossAttention(
            _names(f"{name}.encoder_attn"),
            attention_params(config, AttentionType.ENCODER_DECODER, placement.group),
            layer_index + 1,
            placement,
        )
        self._cross_norm = layer_norm(f"{name}.encoder_attn_layer_norm", config, placement)
        self._mlp = _mlp(name, config, config.decoder.intermediate_size, placement)
        self._mlp_norm = layer_norm(f"{name}.final_layer_norm", config, placement)

    def __call__(
        self,
        hidden: torch.Tensor,
        encoded: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`; `encoded` is None if the encoder ran for none."""
        hidden = self._attention_norm(hidden + self._attention(hidden, kv_cache, metadata))
        hidden = self._cross_norm(hidden + self._cross(hidden, encoded, kv_cache, metadata))
        return self._mlp_norm(hidden + self._mlp(hidden))

    def sublayers(self) -> Iterator[Layer]:
        yield self._attention
        yield self._attention_norm
        yield self._cross
        yield self._cross_norm
        yield self._mlp
        yield self._mlp_norm


def attention_params(
    config: BartConfig, kind: AttentionType, group: ParallelGroup
) -> AttentionParams:
    """Return the parameters of one layer's attention on this rank."""
    params = AttentionParams(
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_size=config.head_size,
        scale=config.head_size**-0.5,
        attention_type=kind,
    )
    return params.shard(group.rank, group.size)


def layer_norm(name: str, config: BartConfig, placement: Placement) -> LayerNorm:
    """Return the norm that a checkpoint calls by this name."""
    return LayerNorm(name, config.hidden_size, _NORM_EPS, placement, has_bias=True)


def _self_attention(
    name: str, config: BartConfig, layer_index: int, kind: AttentionType, placement: Placement
) -> EncoderSelfAttention:
    return EncoderSelfAttention(
        _names(f"{name}.self_attn"),
        attention_params(config, kind, placement.group),
        layer_index,
        placement,
    )


def _mlp(name: str, config: BartConfig, intermediate_size: int, placement: Placement) -> PlainMLP:
    params = MLPParams(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        activation="gelu",
        has_bias=True,
    )
    return PlainMLP((f"{name}.fc1",), f"{name}.fc2", params, placement)


def _names(name: str) -> ProjectionNames:
    return ProjectionNames(
        query=f"{name}.q_proj",
        key=f"{name}.k_proj",
        value=f"{name}.v_proj",
        output=f"{name}.out_proj",
    )


class CrossAttention(CompositeLayer):
    """Queries from the decoder, keys and values from the encoder; all projections have a bias."""

    def __init__(
        self,
        names: ProjectionNames,
        params: AttentionParams,
        layer_index: int,
        place: Placement,
    ) -> None:
        """`params` are those of this rank."""
        assert place.backend is not None
        self._size = params.num_heads * params.head_size
        hidden_size = self._size * place.group.size
        part = part_of(hidden_size, place.group)

        def projection(*names: str) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                hidden_size,
                [Columns(name=name, total=hidden_size, part=part) for name in names],
                place,
                has_bias=True,
            )

        self._query = projection(names.query)
        self._key_value = projection(names.key, names.value)
        self._attend = Attention(params, layer_index=layer_index, backend=place.backend).forward
        self._output = RowParallelLinear(
            names.output, hidden_size, hidden_size, place, has_bias=True
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        encoded: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]`.

        `encoded` is `[num_encoder_tokens, hidden_size]`, what the encoder made in this step, or
        None if it ran for no sequence.
        """
        key, value = None, None
        if encoded is not None:
            key, value = self._key_value(encoded).split(self._size, dim=1)
        return self._output(self._attend(self._query(hidden), key, value, kv_cache, metadata))

    def sublayers(self) -> Iterator[Layer]:
        yield self._query
        yield self._key_value
        yield self._output


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
