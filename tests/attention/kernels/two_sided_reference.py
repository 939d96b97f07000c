"""Attention with two-sided windows and its log-sum-exp, in float64, as the definition says."""

import torch

from attention.kernels.triton.tuning import AttentionOptions


def two_sided_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[queries, heads, head_size]` and the log-sum-exp, `[queries, heads]`.

    The scales of the cache are not applied: `key` and `value` are the values of the cache. `sinks`
    is `[heads]`.
    """
    num_queries, num_keys = len(query), len(key)
    num_queries_per_kv = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(num_queries_per_kv, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    distance = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
    if options.alibi_slopes is not None:
        scores = scores - options.alibi_slopes.cpu().double()[:, None, None] * distance.abs()
    is_hidden = torch.zeros_like(distance, dtype=torch.bool)
    if options.window_left >= 0:
        is_hidden |= distance < -options.window_left
    if options.window_right >= 0:
        is_hidden |= distance > options.window_right
    scores = scores.masked_fill(is_hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.cpu().double()[:, None])
    probabilities = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", probabilities, value), lse.T
