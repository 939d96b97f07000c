"""Makes the norms of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.norm import LayerNorm, OffsetRMSNorm, RMSNorm

if TYPE_CHECKING:
    import torch

    from pagedray.config import ModelConfig
    from workers.layers.norm import ResidualNorm
    from workers.parallel.group import ParallelGroup

__all__ = ["make_norm"]


def make_norm(
    name: str,
    config: ModelConfig,
    group: ParallelGroup,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sums_over: ParallelGroup | None = None,
) -> ResidualNorm:
    """Return a norm of the residual stream, of the kind that the model has.

    `sums_over` is the group whose partial outputs it adds to the stream, as in `ResidualNorm`. An
    all-reduce of `group` may come right before it.
    """
    size, eps, overlaps = config.hidden_size, config.norm_eps, group.size == 1
    match config.norm_kind:
        case "rms" | "offset_rms" as kind:
            return (RMSNorm if kind == "rms" else OffsetRMSNorm)(
                name,
                size,
                eps,
                dtype=dtype,
                device=device,
                sums_over=sums_over,
                overlaps=overlaps,
            )
        case "layer":
            return LayerNorm(
                name,
                size,
                eps,
                has_bias=config.has_norm_bias,
                dtype=dtype,
                device=device,
                sums_over=sums_over,
                overlaps=overlaps,
            )
