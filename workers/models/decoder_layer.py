"""One layer of a decoder: attention and an MLP or experts, with their norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.mlp import MLP
from workers.layers.norm import ResidualNorm
from workers.layers.stream_sum import StreamSum
from workers.layers.weight import CompositeLayer
from workers.models.attended import Attended
from workers.models.halved_layers import HalvedLayer
from workers.models.mlp_factory import make_mlp
from workers.models.norm_factory import make_norm
from workers.models.scaled_mlp import ScaledMLP
from workers.models.self_attention import DecoderSelfAttention

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attention.abstract import AttentionBackend
    from attention.kernels.quantized_rows import QuantizedRows
    from attention.kernels.split_rows import SplitRows
    from attention.kernels.unnormed_row import UnnormedRow
    from pagedray.model_config import ModelConfig
    from pagedray.rank_roofline import WeightWork
    from workers.layers.experts import ExpertLayer
    from workers.layers.rope import Rotation
    from workers.layers.weight import Layer
    from workers.models.step_attention import StepAttention
    from workers.parallel.group import ParallelGroup

__all__ = ["DecoderLayer", "decoder_layer_class", "summed_by_norm"]


def decoder_layer_class(config: ModelConfig) -> type[DecoderLayer]:
    """Return the class of a model's layers."""
    return ParallelDecoderLayer if config.has_parallel_mlp else DecoderLayer


def summed_by_norm(config: ModelConfig, group: ParallelGroup) -> ParallelGroup | None:
    """Return the group if the norm behind a layer sums the parts of that layer's output."""
    return group if config.names.mlp_post_norm is None else None


def _normed(
    norm: ResidualNorm | StreamSum,
    residual: torch.Tensor,
    delta: torch.Tensor | SplitRows | None,
    reader: DecoderSelfAttention | MLP | ExpertLayer | ScaledMLP,
) -> torch.Tensor | QuantizedRows | UnnormedRow:
    """Return the norm of the stream as its reader can best read it.

    It is quantized if the reader would quantize it, and one row may be left to the reader.
    """
    if reader.takes_quantized(len(residual)):
        return norm.quantized(residual, delta)
    if reader.takes_unnormed(len(residual)):
        return norm.unnormed(residual, delta)
    return norm(residual, delta)


class DecoderLayer(CompositeLayer):
    """Pre-normed attention and MLP; some families add a norm behind each of the two."""

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
        names = config.names
        prefix = names.decoder_layer.format(index)

        def norm(name: str | None, sums_over: ParallelGroup | None) -> ResidualNorm | StreamSum:
            if name is None:
                return StreamSum(sums_over)
            return make_norm(
                f"{prefix}.{name}", config, group, dtype=dtype, device=device, sums_over=sums_over
            )

        def norm_if(name: str | None) -> ResidualNorm | StreamSum | None:
            return norm(name, None) if name is not None else None

        # The norm that follows sums the parts of the ranks, except for a norm of the sum alone.
        self._attention_norm = norm(names.attention_norm, summed_by_norm(config, group))
        attention_sum = group if names.attention_post_norm is None else None
        self._attention = DecoderSelfAttention(
            prefix,
            config,
            index,
            group,
            reduces=attention_sum is None,
            backend=backend,
            dtype=dtype,
            device=device,
        )
        self._attention_post_norm = norm_if(names.attention_post_norm)
        self._mlp_norm = norm(names.mlp_norm, attention_sum)
        mlp = make_mlp(
            prefix,
            config,
            index,
            group,
            reduces=summed_by_norm(config, group) is None,
            dtype=dtype,
            device=device,
        )
        self._mlp_post_norm = norm_if(names.mlp_post_norm)
        self._mlp: MLP | ExpertLayer | ScaledMLP = mlp
        if config.residual_scale != 1.0:
            self._mlp = ScaledMLP(mlp, config.residual_scale)

    def attend(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | SplitRows | None,
        rotation: Rotation,
        attention: StepAttention,
    ) -> Attended:
        """Add `delta`, the output of the layer before, to `residual`, and compute the attention.

        Both are `[num_tokens, hidden_size]`; `residual` changes in place. An output is this rank's
        part of a sum if `summed_by_norm` has a group, and None if `residual` has it already.
        """
        hidden = _normed(self._attention_norm, residual, delta, self._attention)
        return Attended(residual, self._attention(hidden, rotation, attention))

    def finish(self, tokens: Attended) -> torch.Tensor | SplitRows | None:
        """Return the layer's output for tokens that `attend` has returned, or some of these.

        It is as `attend` takes that of the layer before. Their `residual` changes in place.
        """
        residual = tokens.residual
        if self._attention_post_norm is None:
            delta = self._attention.add_or_return_output(residual, tokens.heads)
        else:
            delta = self._attention_post_norm(self._attention.output(tokens.heads))
        hidden = _normed(self._mlp_norm, residual, delta, self._mlp)
        if self._mlp_post_norm is None:
            return self._mlp.add_or_return(residual, hidden)
        return self._mlp_post_norm(self._mlp(hidden))

    def finish_work(self) -> WeightWork:
        """Return what the weights that `finish` reads cost a step."""
        norms = (self._attention_post_norm, self._mlp_norm, self._mlp_post_norm)
        layers = (self._mlp, *(norm for norm in norms if norm is not None))
        return sum((one.weight_work() for one in layers), self._attention.output_work())

    def halved(self) -> HalvedLayer | None:
        """Return what runs this layer on halves of a step; None if that would not be faster.

        Experts would be read twice, and norms of outputs need whole sums.
        """
        if (
            isinstance(self._attention_norm, ResidualNorm)
            and isinstance(self._mlp_norm, ResidualNorm)
            and isinstance(self._mlp, MLP)
            and self._attention_post_norm is None
            and self._mlp_post_norm is None
        ):
            return HalvedLayer(self._attention_norm, self._attention, self._mlp_norm, self._mlp)
        return None

    def sublayers(self) -> Iterator[Layer]:
        yield self._attention_norm
        yield self._attention
        if self._attention_post_norm is not None:
            yield self._attention_post_norm
        yield self._mlp_norm
        yield self._mlp
        if self._mlp_post_norm is not None:
            yield self._mlp_post_norm


class ParallelDecoderLayer(DecoderLayer):
    """A layer whose attention and MLP both read one norm of the stream, as in Cohere's models."""

    def halved(self) -> HalvedLayer | None:
        return None

    def attend(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | SplitRows | None,
        rotation: Rotation,
        attention: StepAttention,
    ) -> Attended:
        hidden = self._attention_norm(residual, delta)
        return Attended(residual, self._attention(hidden, rotation, attention), hidden)

    def finish(self, tokens: Attended) -> torch.Tensor:
        assert tokens.normed is not None
        return self._attention.output(tokens.heads).add_(self._mlp(tokens.normed))

    def finish_work(self) -> WeightWork:
        return self._attention.output_work() + self._mlp.weight_work()

    def sublayers(self) -> Iterator[Layer]:
        yield self._attention_norm
        yield self._attention
        yield self._mlp
