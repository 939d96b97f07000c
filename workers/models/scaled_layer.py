"""Layers that scale the residual stream, as in Gemma 4, and what some of these models add to them.

Beside the MLP there may be experts, and each token may have an embedding for each layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from workers.layers.activation import activation_function
from workers.layers.embedding import VocabEmbedding
from workers.layers.experts import ExpertLayer
from workers.layers.linear import ColumnParallelLinear, Columns
from workers.layers.norm import RMSNorm
from workers.layers.weight import CompositeLayer, Layer, Placement, WeightShard
from workers.models.decoder_layer import DecoderLayer, make_norm, normed
from workers.parallel.group import SoloGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.model_config import LayerEmbedding, ModelConfig
    from pagedray.rank_roofline import WeightWork
    from workers.layers.rope import Rotation
    from workers.models.self_attention import StepAttention

__all__ = ["LayerEmbeddings", "ScaledDecoderLayer"]


class ScaledDecoderLayer(DecoderLayer):
    """A layer with four norms whose output is multiplied by a number of the checkpoint."""

    def __init__(self, config: ModelConfig, index: int, place: Placement) -> None:
        super().__init__(config, index, place)
        prefix = config.names.decoder_layer.format(index)
        self.side_experts = None
        if config.has_side_experts:
            self.side_experts = SideExperts(prefix, config, place)
        self.embedding_input = None
        if config.layer_embedding is not None:
            self.embedding_input = EmbeddingInput(prefix, config, config.layer_embedding, place)
        self.scale = _Scale(f"{prefix}.{config.names.layer_scale}", place)

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attention: StepAttention,
        embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(normed(self.attention_norm, x), rotation, attention)
        x = x + normed(self.attention_post_norm, attended)
        output = self.mlp(normed(self.mlp_norm, x))
        if self.side_experts is not None:
            output = self.side_experts(x, output)
        x = x + normed(self.mlp_post_norm, output)
        if self.embedding_input is not None:
            assert embedding is not None
            x = x + self.embedding_input(x, embedding)
        return x * self.scale.value

    def tail_work(self) -> WeightWork:
        more = (self.side_experts, self.embedding_input)
        work = super().tail_work()
        return sum((layer.weight_work() for layer in more if layer is not None), work)


class _Scale(Layer):
    """One number of a checkpoint."""

    def __init__(self, name: str, place: Placement) -> None:
        self._name = name
        self.value = torch.empty(1, dtype=place.dtype, device=place.device)

    def weight_shards(self) -> Iterator[WeightShard]:
        yield WeightShard.whole(self._name, self.value, dummy=1.0)


class SideExperts(CompositeLayer):
    """Experts that read the residual stream, and whose output is added to that of the MLP."""

    def __init__(self, prefix: str, config: ModelConfig, place: Placement) -> None:
        assert config.experts is not None
        names = config.names
        assert names.side_mlp_norm is not None
        self.mlp_norm, self.norm, self.post_norm = (
            make_norm(f"{prefix}.{name}", config, place)
            for name in (names.side_mlp_norm, names.side_expert_norm, names.side_expert_post_norm)
        )
        self.router_norm = _RouterNorm(
            f"{prefix}.{names.router_norm}", config.hidden_size, config.norm_eps, place
        )
        self.experts = ExpertLayer(
            prefix, names, config.experts, place, hidden_size=config.hidden_size, shared=None
        )
        self._group = place.group

    def __call__(self, stream: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Return the output of MLP and experts; all are `[num_tokens, hidden_size]`.

        `stream` is the input of the norm before the MLP, and `output` is that of the MLP.
        """
        choice = self.experts.choose(self.router_norm(stream))
        part = self.experts.partial(self.norm(stream), choice)
        return self.mlp_norm(output) + self.post_norm(self._group.all_reduce(part))


class _RouterNorm(RMSNorm):
    """The norm of a router's input, divided by the square root of its size."""

    def weight_shards(self) -> Iterator[WeightShard]:
        for shard in super().weight_shards():
            yield replace(shard, name=self._name)

    def finalize(self) -> None:
        self.weight.mul_(len(self.weight) ** -0.5)


class EmbeddingInput(CompositeLayer):
    """Adds a layer's embedding of each token to the residual stream, gated by the stream.

    All ranks compute it, since it is small.
    """

    def __init__(
        self, prefix: str, config: ModelConfig, embedding: LayerEmbedding, place: Placement
    ) -> None:
        self._gate = _whole_linear(
            f"{prefix}.per_layer_input_gate", config.hidden_size, embedding.size, place
        )
        self._projection = _whole_linear(
            f"{prefix}.per_layer_projection", embedding.size, config.hidden_size, place
        )
        self.norm = make_norm(f"{prefix}.post_per_layer_input_norm", config, place)
        self._function = activation_function(config.activation)

    def __call__(self, stream: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the addition to the stream, `[num_tokens, hidden_size]`."""
        return self.norm(self.projected(stream, embedding))

    def projected(self, stream: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the result of a call without the norm."""
        gated = self._function(self._gate(stream)).mul_(embedding)
        return self._projection(gated)


class LayerEmbeddings(CompositeLayer):
    """The embeddings of tokens by layer: from a table, and from their first embedding."""

    def __init__(self, config: ModelConfig, embedding: LayerEmbedding, place: Placement) -> None:
        self._shape = (config.num_layers, embedding.size)
        size = config.num_layers * embedding.size
        self._table = VocabEmbedding(
            "model.embed_tokens_per_layer",
            embedding.vocab_size,
            size,
            place,
            scale=embedding.size**0.5,
        )
        self._projection = _whole_linear(
            "model.per_layer_model_projection", config.hidden_size, size, place
        )
        self._projection_scale = config.hidden_size**-0.5
        self._norm = RMSNorm(
            "model.per_layer_projection_norm", embedding.size, config.norm_eps, place
        )

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embeddings, `[num_layers, num_tokens, size]`, strided.

        `embedded` is the input of the first layer, `[num_tokens, hidden_size]`.
        """
        projected = self._projection(embedded).mul_(self._projection_scale)
        rows = self._norm(projected.unflatten(1, self._shape))
        rows = rows.add_(self._table(token_ids).unflatten(1, self._shape)).mul_(2.0**-0.5)
        return rows.transpose(0, 1)


def _whole_linear(name: str, in_size: int, out_size: int, place: Placement) -> ColumnParallelLinear:
    """Return a linear layer that each rank has as a whole."""
    columns = Columns(name=name, total=out_size, part=slice(0, out_size))
    place = replace(place, group=SoloGroup())
    return ColumnParallelLinear(in_size, [columns], place, has_bias=False)
