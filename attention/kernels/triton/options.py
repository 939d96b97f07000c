"""Options of the attention kernels: windows, soft cap, ALiBi and scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionOptions"]

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionOptions:
    """The options of one launch.

    Queries are aligned with the last keys: query `i` of `num_queries` is at position
    `num_keys - num_queries + i`, and sees the keys from `position - window_left` to
    `position + window_right`, inclusive.
    """

    scale: float
    window_left: int = -1
    """Keys that a query sees before its own position; -1 for all."""
    window_right: int
    """Keys that a query sees after its own position: 0 is causal, -1 is all."""
    soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)`, before bias and mask."""
    alibi_slopes: torch.Tensor | None = None
    """float32, `[num_heads]`; the bias is `-slope * abs(key - query position)`."""
    k_scale: float = 1.0
    """Factor of cached keys."""
    v_scale: float = 1.0
    """Factor of cached values."""

    @property
    def dot_scale(self) -> float:
        """Return the factor from a product of query and key to the exponent's argument.

        That argument is in units of log2(e), or with a soft cap the argument of tanh.
        """
        unit = _LOG2_E if self.soft_cap is None else 1.0 / self.soft_cap
        return self.scale * self.k_scale * unit

    @property
    def cap(self) -> float:
        """Return the soft cap in units of log2(e), or 0 for none."""
        return 0.0 if self.soft_cap is None else self.soft_cap * _LOG2_E
