"""Makes the MLP or the experts of a decoder's layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.experts import ExpertLayer
from workers.layers.mlp import MLP, GatedMLP, PlainMLP

if TYPE_CHECKING:
    import torch

    from pagedray.config import ModelConfig
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
    if experts is not None:
        return ExpertLayer(
            prefix,
            config.names,
            experts,
            hidden_size=config.hidden_size,
            reduces=reduces,
            group=group,
            dtype=dtype,
            device=device,
        )
    kind = GatedMLP if config.is_mlp_gated else PlainMLP
    return kind(
        tuple(f"{prefix}.{name}" for name in config.names.mlp_input),
        f"{prefix}.{config.names.mlp_output}",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        activation=config.activation,
        has_bias=config.has_mlp_bias,
        reduces=reduces,
        group=group,
        dtype=dtype,
        device=device,
    )
