"""Attention over keys and values that are concatenated, not in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.kernels.triton.prompts.chunk_attention import KeyLayout, attend_chunks
from attention.kernels.triton.tuning import PagedAttentionTuning, default_chunk_tuning

if TYPE_CHECKING:
    import torch

    from attention.kernels.triton.options import AttentionOptions

__all__ = ["ragged_attention"]


def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    kv_starts: torch.Tensor,
    max_query_len: int,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tuning: PagedAttentionTuning | None = None,
) -> None:
    """Attend over `key` and `value`, `[num_kv_tokens, num_kv_heads, head_size]`.

    Both have the same strides. `kv_starts` is int32 `[B + 1]`; all else is as in
    `paged_attention`.
    """
    attend_chunks(
        query,
        KeyLayout(keys=key, values=value, bounds=kv_starts, block_tables=None),
        out,
        lse,
        query_starts=query_starts,
        max_query_len=max_query_len,
        options=options,
        sinks=sinks,
        tuning=tuning
        or default_chunk_tuning(
            num_queries_per_kv=query.shape[1] // key.shape[1],
            head_size=query.shape[2],
            dtype=query.dtype,
            max_query_len=max_query_len,
        ),
    )
