"""Makes the MLP or the experts of a decoder's layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.experts import ExpertLayer
from workers.layers.mlp import MLP, GatedMLP, MLPParams, PlainMLP

if TYPE_CHECKING:
    import torch

    from pagedray.model_config import ModelConfig
    from workers.parallel.group import ParallelGroup

__all__ = ["make_mlp"]


def make_mlp(
    prefix: str,
    config: ModelConfig,
    layer_index: int,
    group: ParallelGroup,
    *,
    reduces: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> MLP | ExpertLayer:
    """Return what follows attention in a layer, of the kind that the model has there.

    Without `reduces`, its output is this rank's part of the sum.
    """
    experts = config.experts_of(layer_index)
    names = config.names

    def mlp(inputs: tuple[str, ...], output: str, size: int, *, reduces: bool) -> MLP:
        kind = GatedMLP if config.is_mlp_gated else PlainMLP
        params = MLPParams(
            hidden_size=config.hidden_size,
            intermediate_size=size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
        )
        return kind(
            tuple(f"{prefix}.{name}" for name in inputs),
            f"{prefix}.{output}",
            params,
            reduces=reduces,
            group=group,
            quantization=config.quantization,
            dtype=dtype,
            device=device,
        )

    if experts is None:
        return mlp(names.mlp_input, names.mlp_output, config.intermediate_size, reduces=reduces)
    shared = None
    if experts.shared_size is not None:
        shared = mlp(names.shared_input, names.shared_output, experts.shared_size, reduces=False)
    return ExpertLayer(
        prefix,
        names,
        experts,
        hidden_size=config.hidden_size,
        shared=shared,
        reduces=reduces,
        group=group,
        dtype=dtype,
        device=device,
    )
