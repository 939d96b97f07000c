"""The activation of an expert: its gate and up projections, multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gated"]


@triton.jit
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    is_clamped: tl.constexpr,
    alpha: tl.constexpr,
    limit: tl.constexpr,
) -> tl.tensor:
    """Return `silu(gate) * up`, or with `is_clamped` the `ClampedGate`; all float32."""
    if is_clamped:
        # Unlike minimum and maximum, these comparisons propagate NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        return gate / (1.0 + tl.exp(-gate)) * up
