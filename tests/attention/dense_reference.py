"""Attention as its definition says, in float64: what every backend is measured against."""

import torch

from attention.params import AttentionParams

__all__ = ["dense_attention", "relative_error"]


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Return `[queries, heads, head_size]`; the last query sits at the position of the last key."""
    num_queries, num_keys = len(query), len(key)
    key, value = (t.double().repeat_interleave(params.group_size, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    distance = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
    if params.alibi_slopes is not None:
        slopes = torch.tensor(params.alibi_slopes, dtype=torch.float64)
        scores = scores + slopes[:, None, None] * distance
    hidden = (distance > 0) | (distance <= -(params.sliding_window or num_keys))
    probabilities = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", probabilities, value)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference; NaN stays NaN."""
    difference = result.double() - reference.double()
    return float(difference.norm() / reference.double().norm())
