"""One decoder for every family: what differs between them is in `ModelConfig`.

The residual stream is added to and normed in one place, `ResidualNorm`, so that a device may
do both, and the all-reduce before them, in one kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.layers.embedding import ParallelHead, VocabEmbedding
from workers.layers.mlp import GatedMLP
from workers.layers.norm import ResidualNorm
from workers.layers.rope import RotaryEmbedding, Rotation
from workers.models.self_attention import SelfAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.abstract import AttentionBackend, AttentionMetadata
    from pagedray.config import ModelConfig
    from workers.layers.weight import Layer, WeightSlot
    from workers.parallel import ParallelGroup

__all__ = ["Decoder"]


class Decoder:
    """One rank's part of a model. Fill it with `load_weights` before the first forward."""

    def __init__(
        self,
        config: ModelConfig,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        device: torch.device,
    ) -> None:
        dtype = getattr(torch, config.dtype)
        self.config = config
        self.dtype: torch.dtype = dtype
        self.device = device
        self._embedding = VocabEmbedding(
            "model.embed_tokens.weight",
            config.vocab_size,
            config.hidden_size,
            group=group,
            dtype=dtype,
            device=device,
        )
        self._rope = RotaryEmbedding(
            config.rope,
            head_size=config.head_size,
            max_positions=config.max_positions,
            dtype=dtype,
            device=device,
        )
        self._layers = [
            _DecoderLayer(config, index, group, backend=backend, dtype=dtype, device=device)
            for index in range(config.num_layers)
        ]
        self._norm = _residual_norm("model.norm.weight", config, dtype, device)
        self._head = ParallelHead(
            "lm_head.weight",
            config.vocab_size,
            config.hidden_size,
            group=group,
            tied_to=self._embedding if config.has_tied_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        sampled_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normed hidden states of some tokens, `[num_sampled, hidden_size]`.

        `token_ids` and `positions` are `[num_tokens]` int64, and `sampled_rows`, `[num_sampled]`
        int64, are the tokens whose logits are wanted; None is all of them.
        """
        residual = self._embedding(token_ids)
        rotation = self._rope.at(positions)
        delta = None
        for layer in self._layers:
            delta = layer(residual, delta, rotation, kv_cache, metadata)
        assert delta is not None
        if sampled_rows is not None:
            if not len(sampled_rows):
                return delta.narrow(0, 0, 0)
            residual = residual.index_select(0, sampled_rows)
            delta = delta.index_select(0, sampled_rows)
        return self._norm(residual, delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[num_sampled, vocab_size]` float32, the same on every rank."""
        return self._head(hidden)

    def slots(self) -> Iterator[WeightSlot]:
        """Yield every tensor that must be loaded; not to be called after `finalize`."""
        for part in self._parts():
            yield from part.slots()

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with, layer by layer."""
        for part in self._parts():
            part.finalize()

    def _parts(self) -> Iterator[Layer]:
        yield self._embedding
        yield from self._layers
        yield self._norm
        yield self._head


class _DecoderLayer:
    """Attention and MLP, each between a norm and an addition to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        group: ParallelGroup,
        *,
        backend: type[AttentionBackend],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        name = f"model.layers.{index}"
        self._attention_norm = _residual_norm(
            f"{name}.input_layernorm.weight", config, dtype, device
        )
        self._attention = SelfAttention(
            f"{name}.self_attn", config, index, group, backend=backend, dtype=dtype, device=device
        )
        self._mlp_norm = _residual_norm(
            f"{name}.post_attention_layernorm.weight", config, dtype, device
        )
        self._mlp = GatedMLP(
            f"{name}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            has_bias=config.has_mlp_bias,
            group=group,
            dtype=dtype,
            device=device,
        )

    def __call__(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Add what the layer before computed, and return what is to be added next."""
        hidden = self._attention_norm(residual, delta)
        attended = self._attention(hidden, rotation, kv_cache, metadata)
        return self._mlp(self._mlp_norm(residual, attended))

    def slots(self) -> Iterator[WeightSlot]:
        """Yield the weights of all parts."""
        for part in self._parts():
            yield from part.slots()

    def finalize(self) -> None:
        """Bring loaded weights into the form that is computed with."""
        for part in self._parts():
            part.finalize()

    def _parts(self) -> Iterator[Layer]:
        yield self._attention_norm
        yield self._attention
        yield self._mlp_norm
        yield self._mlp


def _residual_norm(
    name: str, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ResidualNorm:
    return ResidualNorm(name, config.hidden_size, config.norm_eps, dtype=dtype, device=device)
