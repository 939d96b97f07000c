"""Attention of chunks and prefills over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attention.kernels.triton.prompts.chunk_attention import KeyLayout, attend_chunks
from attention.kernels.triton.tuning import PagedAttentionTuning, default_chunk_tuning

if TYPE_CHECKING:
    import torch

    from attention.kernels.triton.options import AttentionOptions

__all__ = ["paged_attention"]


def paged_attention(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_query_len: int,
    options: AttentionOptions,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tuning: PagedAttentionTuning | None = None,
) -> None:
    """Attend for any number of queries per sequence, `[num_tokens, num_heads, head_size]`.

    `layer_cache` is `[num_blocks, 2, block_size, num_kv_heads, head_size]`, of the queries'
    element type or fp8, and may be strided. `query_starts` is int32 `[B + 1]`, `seq_lens` int32
    `[B]`, the queries' own keys included if they are cached, `block_tables` int32 `[B, width]`.
    No sequence has more queries than `max_query_len`. `lse` is float32 `[num_tokens, num_heads]`,
    the natural logarithm of the sum of exponentials; a query without keys has -inf, and its output
    is zero. `sinks` is float32 `[num_heads]`, a score of each head that counts in the softmax, and
    so in `lse`, but has no value. Tokens of no sequence are left unchanged, and blocks that no
    query can see are not read.
    """
    layout = KeyLayout(
        keys=layer_cache[:, 0],
        values=layer_cache[:, 1],
        bounds=seq_lens,
        block_tables=block_tables,
    )
    attend_chunks(
        query,
        layout,
        out,
        lse,
        query_starts=query_starts,
        max_query_len=max_query_len,
        options=options,
        sinks=sinks,
        tuning=tuning
        or default_chunk_tuning(
            num_queries_per_kv=query.shape[1] // layer_cache.shape[3],
            head_size=query.shape[2],
            dtype=query.dtype,
            max_query_len=max_query_len,
        ),
    )
