"""Attention of several queries per sequence, over blocks or over ragged keys and values.

The algorithm is FlashAttention-2 (Dao, 2023), with block tables as in paged attention (Kwon et al.,
2023). Owns the kernel and its launch; callers use `paged_attention` or `ragged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton.tiles import (
    attend,
    count_sinks,
    load_slopes,
    load_vectors,
    log_sum,
    mean_values,
    stride_unit,
    wide_strides,
)
from attention.kernels.triton.tuning import (
    AttentionOptions,
    PagedAttentionTuning,
    default_chunk_tuning,
    dot_type,
    next_power_of_two,
)

__all__ = ["paged_attention", "ragged_attention"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyLayout:
    """The keys and values of all sequences."""

    keys: torch.Tensor
    """`[num_blocks, block_size, num_kv_heads, head_size]`, or without blocks
    `[num_tokens, num_kv_heads, head_size]`; values have the same strides."""
    values: torch.Tensor
    bounds: torch.Tensor
    """int32: number of keys of each sequence, `[B]`; without blocks where they start, `[B + 1]`."""
    block_tables: torch.Tensor | None
    """int32, `[B, width]`; None for keys and values without blocks."""

    def __post_init__(self) -> None:
        assert self.keys.stride() == self.values.stride()
        assert self.keys.stride(-1) == 1
        assert self.bounds.dtype == torch.int32
        assert self.keys.ndim == (3 if self.block_tables is None else 4)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_chunks(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    slopes: tl.tensor,
    sinks: tl.tensor,
    query_starts: tl.tensor,
    bounds: tl.tensor,
    tables: tl.tensor,
    query_token_stride: tl.tensor,
    query_head_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_token_stride: tl.tensor,
    block_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    window_left: tl.tensor,
    window_right: tl.tensor,
    dot_scale: tl.tensor,
    cap: tl.tensor,
    v_scale: tl.tensor,
    has_left: tl.constexpr,
    has_right: tl.constexpr,
    has_cap: tl.constexpr,
    has_slopes: tl.constexpr,
    has_sinks: tl.constexpr,
    has_lse: tl.constexpr,
    operand_type: tl.constexpr,
    stride_unit: tl.constexpr,
    num_queries_per_kv: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    padded_size: tl.constexpr,
    tile_vectors: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Attend for one tile of the queries of one sequence and one KV head.

    Launched by `attend_chunks`; grid `(tiles of queries, num_kv_heads, num_sequences)`.
    Pointers: query, out `[num_tokens, num_heads, head_size]`; keys, values
    `[num_blocks, block_size, num_kv_heads, head_size]`, or with `block_size` 0
    `[num_kv_tokens, num_kv_heads, head_size]`, of the model's dtype or fp8; lse
    `[num_tokens, num_heads]` float32; slopes, sinks `[num_heads]` float32; query_starts `[B + 1]`
    int32; bounds `[B]` int32, the numbers of keys, or with `block_size` 0 `[B + 1]`, where they
    start; tables `[B, width]` int32.
    """
    tile_queries: tl.constexpr = tile_vectors // num_queries_per_kv
    block_stride, token_stride, head_stride = wide_strides(
        block_stride, token_stride, head_stride, stride_unit
    )
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    query_start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - query_start
    # With a causal mask the last queries have the most keys, so they start first.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * tile_queries
    if first_query >= num_queries:
        return

    if block_size == 0:
        key_start = tl.load(bounds + sequence)
        num_keys = tl.load(bounds + sequence + 1) - key_start
        sequence_offset = key_start.to(tl.int64) * token_stride
    else:
        num_keys = tl.load(bounds + sequence)
        sequence_offset = 0

    vectors = tl.arange(0, tile_vectors)
    queries = first_query + vectors // num_queries_per_kv
    heads = kv_head * num_queries_per_kv + vectors % num_queries_per_kv
    is_vector = (vectors < tile_queries * num_queries_per_kv) & (queries < num_queries)
    tokens = (query_start + queries).to(tl.int64)
    q = load_vectors(
        query,
        tokens * query_token_stride + heads * query_head_stride,
        is_vector,
        False,
        head_size,
        padded_size,
    ).to(operand_type)
    vector_slopes = load_slopes(slopes, heads, is_vector, has_slopes)

    first_position = num_keys - num_queries + first_query
    last_position = min(first_position + tile_queries, num_keys) - 1
    first_key = 0
    end_key = num_keys
    # Every query sees all keys before this position, so their tiles need no mask.
    unmasked_end = num_keys
    if has_right:
        end_key = min(end_key, last_position + window_right + 1)
        unmasked_end = min(unmasked_end, first_position + window_right + 1)
    unmasked_end = max(unmasked_end, 0) // tile_keys * tile_keys
    if has_left:
        first_key = max(first_position - window_left, 0)
        unmasked_end = first_key // tile_keys * tile_keys

    weighted = tl.zeros([tile_vectors, padded_size], tl.float32)
    top = tl.full([tile_vectors], float("-inf"), tl.float32)
    total = tl.zeros([tile_vectors], tl.float32)
    table = tables + sequence.to(tl.int64) * table_stride
    positions = num_keys - num_queries + queries
    keys += sequence_offset + kv_head * head_stride
    values += sequence_offset + kv_head * head_stride
    for has_mask in tl.static_range(has_left, 2):
        weighted, top, total = attend(
            weighted, top, total, q, positions, vector_slopes, keys, values, table, block_stride,
            token_stride, unmasked_end if has_mask else 0, end_key if has_mask else unmasked_end,
            first_key if has_mask else 0, window_left, window_right, dot_scale, cap, has_mask,
            has_left, has_right, has_cap, has_slopes, block_size, head_size, padded_size, tile_keys,
        )  # fmt: skip

    if has_sinks:
        weighted, top, total = count_sinks(weighted, top, total, sinks, heads, is_vector)
    dims = tl.arange(0, padded_size)
    out_offsets = tokens * out_token_stride + heads * out_head_stride
    tl.store(
        out + out_offsets[:, None] + dims[None, :],
        mean_values(weighted, total, v_scale).to(out.dtype.element_ty),
        mask=is_vector[:, None] & (dims[None, :] < head_size),
    )
    if has_lse:
        tl.store(lse + tokens * lse_token_stride + heads, log_sum(top, total), mask=is_vector)


def attend_chunks(
    query: torch.Tensor,
    layout: KeyLayout,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    query_starts: torch.Tensor,
    max_query_len: int,
    options: AttentionOptions,
    sinks: torch.Tensor | None,
    tuning: PagedAttentionTuning | None,
) -> None:
    """Launch the kernel; shapes are as in `paged_attention` and `ragged_attention`."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads = layout.keys.shape[-2]
    num_queries_per_kv = num_heads // num_kv_heads
    num_sequences = len(query_starts) - 1
    assert query_starts.dtype == torch.int32
    assert num_heads == num_queries_per_kv * num_kv_heads
    assert query.stride(2) == out.stride(2) == 1
    assert lse is None or (lse.dtype == torch.float32 and lse.stride(1) == 1)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    if not num_sequences or not max_query_len:
        return
    tuning = tuning or default_chunk_tuning(
        num_queries_per_kv=num_queries_per_kv,
        head_size=head_size,
        dtype=query.dtype,
        max_query_len=max_query_len,
    )
    assert tuning.tile_vectors >= num_queries_per_kv
    tables = layout.block_tables
    slopes = options.alibi_slopes
    unit = stride_unit(layout.keys)
    num_tiles = triton.cdiv(max_query_len, tuning.tile_vectors // num_queries_per_kv)
    _attend_chunks[(num_tiles, num_kv_heads, num_sequences)](
        query,
        layout.keys,
        layout.values,
        out,
        out if lse is None else lse,
        layout.bounds if slopes is None else slopes,
        layout.bounds if sinks is None else sinks,
        query_starts,
        layout.bounds,
        layout.bounds if tables is None else tables,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        0 if tables is None else layout.keys.stride(0) // unit,
        layout.keys.stride(-3) // unit,
        layout.keys.stride(-2) // unit,
        0 if tables is None else tables.stride(0),
        options.window_left,
        options.window_right,
        options.dot_scale,
        options.cap,
        options.v_scale,
        has_left=options.window_left >= 0,
        has_right=options.window_right >= 0,
        has_cap=options.soft_cap is not None,
        has_slopes=slopes is not None,
        has_sinks=sinks is not None,
        has_lse=lse is not None,
        operand_type=dot_type(query),
        stride_unit=unit,
        num_queries_per_kv=num_queries_per_kv,
        block_size=0 if tables is None else layout.keys.shape[1],
        head_size=head_size,
        padded_size=max(16, next_power_of_two(head_size)),
        tile_vectors=tuning.tile_vectors,
        tile_keys=tuning.tile_keys,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


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
        keys=layer_cache[:, 0], values=layer_cache[:, 1], bounds=seq_lens, block_tables=block_tables
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
        tuning=tuning,
    )


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
        tuning=tuning,
    )
