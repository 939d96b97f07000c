"""Attention as its definition says, in float64: what every backend is measured against."""

import torch

from attention.params import KV_CACHE_DTYPES, AttentionParams, AttentionType


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """Return `[queries, heads, head_size]` float64.

    The last query sits at the position of the last key, but in cross attention, where positions
    mean nothing. Without any key all is zero.
    """
    num_queries, num_keys = len(query), len(key)
    if not num_keys:
        return query.double() * 0
    key, value = (
        t.double().repeat_interleave(params.num_queries_per_kv, dim=1) for t in (key, value)
    )
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    if params.attention_type is not AttentionType.ENCODER_DECODER:
        distance = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
        if params.alibi_slopes is not None:
            slopes = torch.tensor(params.alibi_slopes, dtype=torch.float64)
            scores = scores - slopes[:, None, None] * distance.abs()
        hidden = distance.abs() >= (params.sliding_window or num_keys)
        if params.attention_type is AttentionType.DECODER:
            hidden |= distance > 0
        scores = scores.masked_fill(hidden, float("-inf"))
    sinks = sinks_of(params)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, num_queries, 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., :num_keys], value)


def sinks_of(params: AttentionParams, device: str = "cpu") -> torch.Tensor | None:
    """Return sinks of some heads, one of them below and one above most scores, if any."""
    if not params.has_sinks:
        return None
    sinks = torch.tensor([-9.0, 4.0, 0.3, -0.7, 1.9])[torch.arange(params.num_heads) % 5]
    return sinks.to(device)


def as_cached(x: torch.Tensor, params: AttentionParams, scale: float) -> torch.Tensor:
    """Return keys or values as the cache returns them, rounded to its fp8 type."""
    dtype = KV_CACHE_DTYPES[params.kv_cache_dtype]
    if dtype is None or not params.is_cached:
        return x
    most = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-most, most).to(dtype).double() * scale


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the reference; NaN stays NaN."""
    norm = reference.double().norm()
    difference = (result.double() - reference.double()).norm()
    return float(difference / norm) if norm else float(difference)
