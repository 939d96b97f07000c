"""The layers of BART, whose sublayers are each added to their input and normed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attention.abstract import AttentionMetadata, AttentionParams, AttentionType
from tests.workers.models.bart.config import BartConfig
from tests.workers.models.bart.cross_attention import CrossAttention
from workers.layers.mlp import MLPParams, PlainMLP
from workers.layers.norm import LayerNorm
from workers.layers.weight import CompositeLayer, Layer, Placement
from workers.models.bert import EncoderSelfAttention, ProjectionNames
from workers.parallel.group import ParallelGroup

_NORM_EPS = 1e-5


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
