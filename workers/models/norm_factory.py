"""Makes the norms of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm

if TYPE_CHECKING:
    import torch

    from pagedray.config import ModelConfig
    from workers.layers.norm import ResidualNorm

__all__ = ["make_norm"]


def make_norm(
    name: str, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> ResidualNorm:
    """Return a norm of the residual stream, of the kind that the model has."""
    size, eps = config.hidden_size, config.norm_eps
    match config.norm_kind:
        case "rms":
            return RMSNorm(name, size, eps, dtype=dtype, device=device)
        case "offset_rms":
            return OffsetRMSNorm(name, size, eps, dtype=dtype, device=device)
        case "layer":
            has_bias = config.has_norm_bias
            return LayerNorm(name, size, eps, has_bias=has_bias, dtype=dtype, device=device)
