"""Makes the norms of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.norm import LayerNorm, OffsetRMSNorm, ResidualNorm, RMSNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from pagedray.model_config import ModelConfig, NormKind
    from workers.parallel.group import ParallelGroup

__all__ = ["make_norm"]

_KINDS: Mapping[NormKind, type[ResidualNorm]] = {
    "rms": RMSNorm,
    "offset_rms": OffsetRMSNorm,
    "layer": LayerNorm,
}


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
    return _KINDS[config.norm_kind](
        name,
        config.hidden_size,
        config.norm_eps,
        has_bias=config.has_norm_bias,
        dtype=dtype,
        device=device,
        sums_over=sums_over,
        overlaps=group.size == 1,
    )
