"""One layer of a decoder: attention or recurrence, and an MLP or experts, with their norms.

`DecoderLayer` is the plain definition. `workers.models.fused_layers` runs the same weights with
kernels that do several of these operations at once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from workers.layers.experts import ExpertLayer
from workers.layers.mlp import MLP, GatedMLP, MLPParams, NoMLP, PlainMLP
from workers.layers.norm import LayerNorm, Norm, OffsetRMSNorm, RMSNorm
from workers.layers.recurrent import RecurrentLayer, make_recurrent
from workers.layers.weight import CompositeLayer, Placement
from workers.models.self_attention import DecoderSelfAttention, StepAttention

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pagedray.model_config import ExpertsConfig, ModelConfig, NormKind
    from pagedray.rank_roofline import WeightWork
    from workers.layers.rope import Rotation

__all__ = [
    "DecoderLayer",
    "ParallelDecoderLayer",
    "TwoMixerDecoderLayer",
    "make_mlp",
    "make_norm",
    "normed",
]

_NORMS: Mapping[NormKind, type[Norm]] = {
    "rms": RMSNorm,
    "offset_rms": OffsetRMSNorm,
    "layer": LayerNorm,
}


def make_norm(name: str, config: ModelConfig, place: Placement) -> Norm:
    """Return a norm of the residual stream, of the model's kind."""
    return _NORMS[config.norm_kind](
        name, config.hidden_size, config.norm_eps, place, has_bias=config.has_norm_bias
    )


class DecoderLayer(CompositeLayer):
    """Attention and an MLP; each may have a norm before it and a norm behind it."""

    def __init__(self, config: ModelConfig, index: int, place: Placement) -> None:
        names = config.names
        mixer_index, mlp_index = config.places_of(index)
        prefix = names.decoder_layer.format(mixer_index)
        mlp_prefix = None if mlp_index is None else names.decoder_layer.format(mlp_index)

        def norm(name: str | None, prefix: str | None = prefix) -> Norm | None:
            if name is None or prefix is None:
                return None
            return make_norm(f"{prefix}.{name}", config, place)

        self.attention_norm = norm(names.attention_norm)
        self.attention = _make_mixer(prefix, config, index, place)
        self.attention_post_norm = norm(names.attention_post_norm)
        self.mlp_norm = norm(names.mlp_norm, mlp_prefix)
        self.mlp: MLP | ExpertLayer | NoMLP = NoMLP()
        if mlp_prefix is not None:
            self.mlp = make_mlp(mlp_prefix, config, index, place)
        self.mlp_post_norm = norm(names.mlp_post_norm)
        self.residual_scale = config.residual_scale

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attention: StepAttention,
        embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `[num_tokens, hidden_size]` for `[num_tokens, hidden_size]`.

        `embedding` is the layer's own embedding of each token, `[num_tokens, size]`, for models
        with a `layer_embedding`.
        """
        attended = self._mixed(normed(self.attention_norm, x), rotation, attention)
        x = x + normed(self.attention_post_norm, attended * self.residual_scale)
        output = self.mlp(normed(self.mlp_norm, x))
        return x + normed(self.mlp_post_norm, output * self.residual_scale)

    def _mixed(
        self, rows: torch.Tensor, rotation: Rotation, attention: StepAttention
    ) -> torch.Tensor:
        return self.attention(rows, rotation, attention)

    def tail_work(self) -> WeightWork:
        """Return what the weights behind the attention cost a step."""
        norms = (self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        layers = (self.mlp, *(norm for norm in norms if norm is not None))
        work = self.attention.output.weight_work()
        return sum((layer.weight_work() for layer in layers), work)


class TwoMixerDecoderLayer(DecoderLayer):
    """A layer whose attention and recurrent layer read one norm of the stream, as in Falcon-H1."""

    def __init__(self, config: ModelConfig, index: int, place: Placement) -> None:
        super().__init__(config, index, place)
        prefix = config.names.decoder_layer.format(index)
        self.recurrence = make_recurrent(prefix, config, index, place)

    def _mixed(
        self, rows: torch.Tensor, rotation: Rotation, attention: StepAttention
    ) -> torch.Tensor:
        attended = super()._mixed(rows, rotation, attention)
        return attended + self.recurrence(rows, rotation, attention)

    def tail_work(self) -> WeightWork:
        return super().tail_work() + self.recurrence.output.weight_work()


class ParallelDecoderLayer(DecoderLayer):
    """A layer whose attention and MLP both read one norm of the stream, as in Cohere's models."""

    def __call__(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        attention: StepAttention,
        embedding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = normed(self.attention_norm, x)
        output = self.attention(rows, rotation, attention) + self.mlp(rows)
        return x + output * self.residual_scale

    def tail_work(self) -> WeightWork:
        return self.attention.output.weight_work() + self.mlp.weight_work()


def normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of the stream, or the stream without a norm."""
    return x if norm is None else norm(x)


def _make_mixer(
    prefix: str, config: ModelConfig, layer_index: int, place: Placement
) -> DecoderSelfAttention | RecurrentLayer:
    """Return the attention of a layer, or the recurrent layer in its place."""
    if config.has_attention(layer_index):
        return DecoderSelfAttention(prefix, config, layer_index, place)
    return make_recurrent(prefix, config, layer_index, place)


def num_stacked(config: ModelConfig, experts: ExpertsConfig, place: Placement) -> int:
    """Return the number of experts that a rank stores the shared MLP as; 0 if it stays an MLP.

    The kernels of a GPU for experts then compute it too, and its gate is a column of the router.
    """
    if experts.shared_size is None or place.device.type != "cuda":
        return 0
    is_gated = experts.num_inputs == 2
    is_equal = config.activation == experts.activation and config.is_mlp_gated == is_gated
    is_plain = place.quantization is None and not experts.is_mxfp4 and experts.gate is None
    has_biases = config.has_mlp_bias or experts.has_bias
    is_whole = not experts.is_expert_parallel and experts.latent_size is None
    number, rest = divmod(experts.shared_size, experts.intermediate_size)
    return number if is_equal and is_plain and is_whole and not has_biases and not rest else 0


def make_mlp(
    prefix: str, config: ModelConfig, layer_index: int, place: Placement
) -> MLP | ExpertLayer:
    """Return the MLP or the experts of a layer."""
    experts = config.experts_of(layer_index)
    names = config.names

    def mlp(inputs: tuple[str, ...], output: str, size: int) -> MLP:
        kind = GatedMLP if config.is_mlp_gated else PlainMLP
        params = MLPParams(
            hidden_size=config.hidden_size,
            intermediate_size=size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
            gate_scale=config.multipliers.mlp_gate,
            output_scale=config.multipliers.mlp_output,
        )
        input_names = tuple(f"{prefix}.{name}" for name in inputs)
        return kind(input_names, f"{prefix}.{output}", params, place)

    if experts is None or config.has_side_experts:
        return mlp(names.mlp_input, names.mlp_output, config.mlp_size(layer_index))
    shared = None
    experts = replace(experts, num_stacked=num_stacked(config, experts, place))
    if experts.shared_size is not None and not experts.num_stacked:
        shared = mlp(names.shared_input, names.shared_output, experts.shared_size)
    return ExpertLayer(prefix, names, experts, place, hidden_size=config.hidden_size, shared=shared)
