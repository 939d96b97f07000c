"""What attention kernels are tested with: masks, scores, sinks and shapes."""

from dataclasses import dataclass
from typing import Any

import torch

from attention.kernels.triton.tuning import AttentionOptions

FEATURES: dict[str, dict[str, Any]] = {  # Any: the options differ in type
    "causal": {},
    "scale": {"scale": 0.7},
    "everything": {"window_right": -1},
    "window": {"window_left": 20},
    "own key only": {"window_left": 0},
    "two-sided window": {"window_left": 9, "window_right": 5},
    "right window": {"window_right": 3},
    "left window": {"window_left": 11, "window_right": -1},
    "cap": {"soft_cap": 1.5, "scale": 1.0},
    "ALiBi": {"has_alibi": True},
    "ALiBi both ways": {"has_alibi": True, "window_right": -1},
    "ALiBi and window": {"has_alibi": True, "window_left": 13},
    "cap and window": {"soft_cap": 2.0, "scale": 1.0, "window_left": 17},
    "cap and ALiBi": {"soft_cap": 2.0, "scale": 1.0, "has_alibi": True},
    "sinks": {"has_sinks": True},
    "sinks and window": {"has_sinks": True, "window_left": 13},
    "sinks and left window": {"has_sinks": True, "window_left": 11, "window_right": -1},
    "sinks and cap": {"has_sinks": True, "soft_cap": 1.5, "scale": 1.0},
}
SLOW_FEATURES = (
    "scale",
    "right window",
    "left window",
    "ALiBi both ways",
    "cap and ALiBi",
    "sinks and left window",
    "sinks and cap",
)
"""Those whose parts others have."""
HEADS = [(4, 4), (3, 1), (6, 2), (10, 2), (7, 1), (8, 1), (20, 1)]
"""Query heads and KV heads: 1, 3, 5, 7, 8 per KV head, and more than a small tile has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cache and the queries look like."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """Element type of the cache; None for that of the queries."""
    k_scale: float = 1.0
    v_scale: float = 1.0


def options_of(
    shape: Shape, feature: dict[str, Any], device: str
) -> AttentionOptions:  # Any: above
    """Return the options of a feature, with slopes that no formula would guess."""
    feature = {
        "scale": shape.head_size**-0.5,
        "window_right": 0,
        "k_scale": shape.k_scale,
        "v_scale": shape.v_scale,
    } | feature
    if feature.pop("has_alibi", False):
        slopes = [0.03 + 0.2 / (1 + head) for head in range(shape.num_heads)]
        feature["alibi_slopes"] = torch.tensor(slopes, device=device)
    feature.pop("has_sinks", None)
    return AttentionOptions(**feature)


def sinks_for(
    shape: Shape, feature: dict[str, Any], device: str
) -> torch.Tensor | None:  # Any: above
    """Return the sinks of a feature, one of them below and one above most scores, if any."""
    if not feature.get("has_sinks", False):
        return None
    sinks = torch.tensor([3.5, -40.0, 0.4, -1.1, 60.0])
    return sinks[torch.arange(shape.num_heads) % len(sinks)].to(device)
