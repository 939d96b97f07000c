"""Decodes by xFormers' split-k op, straight from the paged cache."""

from typing import Any, NamedTuple

import torch

from attention.gpu.group import LayerCache
from attention.params import AttentionParams, AttentionSpec
from attention.xformers.library import attend, attn_bias, decode_op

__all__ = ["PagedDecodes"]


class _Inputs(NamedTuple):
    """What the op reads from the GPU; of a captured graph, always the same tensors."""

    query_starts: torch.Tensor
    """`[num_rows + 1]` int32."""
    key_starts: torch.Tensor
    """First key that is seen, `[num_rows]` int32; all zero without a window."""
    key_stops: torch.Tensor
    """`[num_rows]` int32; 0 for a row that pads."""
    tables: torch.Tensor
    """Blocks as the op counts them, `[num_rows, width]` int32."""


class PagedDecodes:
    """Plans one query token for each of some sequences, and attends layer by layer.

    The op is compiled for each number of rows and each width of the tables. Both are padded to
    powers of two, but for a graph, which has one of each.
    """

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        self._window = params.sliding_window
        self._scale = params.scale
        self._block_size = spec.block_size
        # The op has one table for keys and values of one layer. To it, a block of the cache of
        # all layers is a run of so many blocks, of which a layer sees its own.
        self._blocks_per_block = 2 * spec.num_cache_layers
        self._op = decode_op(spec.block_size)
        self._is_graph = is_graph
        self._inputs: _Inputs | None = None
        self._mask: Any = None  # Any: xFormers declares no types

    def plan(self, seq_lens: torch.Tensor, max_seq_len: int, block_tables: torch.Tensor) -> None:
        """Plan for keys of so many tokens, `[num_sequences]`, in the blocks of these tables."""
        num_rows = len(seq_lens)
        width = max(1, -(-max_seq_len // self._block_size))
        if not self._is_graph:
            num_rows, width = _next_power_of_two(num_rows), _next_power_of_two(width)
        if self._inputs is None or not self._is_graph:
            self._inputs = _new_inputs(num_rows, width, seq_lens.device)
            self._mask = self._new_mask(self._inputs)
        inputs = self._inputs
        assert inputs.tables.shape == (num_rows, width)
        stops = inputs.key_stops[: len(seq_lens)]
        stops.copy_(seq_lens)
        if self._window is not None:
            starts = inputs.key_starts[: len(seq_lens)]
            torch.sub(stops, self._window, out=starts).clamp_(min=0)
        tables = block_tables[:, :width]
        torch.mul(
            tables,
            self._blocks_per_block,
            out=inputs.tables[: tables.shape[0], : tables.shape[1]],
        )

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for the planned decodes; sequences without keys come out as zeros."""
        assert self._inputs is not None
        num_rows = len(self._inputs.key_stops)
        if len(query) < num_rows:
            padded = query.new_zeros(num_rows, *query.shape[1:])
            padded[: len(query)].copy_(query)
            query = padded
        key, value = _layer_rows(cache)
        result = attend(self._op, query, key, value, mask=self._mask, scale=self._scale)
        out.copy_(result[: len(out)])

    def _new_mask(self, inputs: _Inputs) -> Any:  # Any: xFormers declares no types
        """Return the mask around tensors that are filled later.

        Its lists on the host are what its own constructors would put there for full tables; the
        op reads tensors and shapes only.
        """
        num_rows, width = inputs.tables.shape
        row_len = width * self._block_size
        query_info = attn_bias._SeqLenInfo(
            seqstart=inputs.query_starts,
            max_seqlen=1,
            min_seqlen=1,
            seqstart_py=list(range(num_rows + 1)),
        )
        if self._window is None:
            key_info = attn_bias._PaddedSeqLenInfo(
                seqstart=inputs.key_starts,
                max_seqlen=row_len,
                min_seqlen=row_len,
                seqstart_py=list(range(0, num_rows * row_len + 1, row_len)),
                seqlen=inputs.key_stops,
                seqlen_py=[row_len] * num_rows,
                padding=row_len,
            )
            mask_type = attn_bias.PagedBlockDiagonalPaddedKeysMask
        else:
            # In a paged mask the lengths of the gappy kind are where rows end.
            key_info = attn_bias._GappySeqInfo(
                seqstart=inputs.key_starts,
                max_seqlen=row_len,
                min_seqlen=row_len,
                seqstart_py=[0] * num_rows,
                seqlen=inputs.key_stops,
                seqlen_py=[row_len] * num_rows,
            )
            mask_type = attn_bias.PagedBlockDiagonalGappyKeysMask
        return mask_type(
            q_seqinfo=query_info,
            k_seqinfo=key_info,
            block_tables=inputs.tables,
            page_size=self._block_size,
        )


def _new_inputs(num_rows: int, width: int, device: torch.device) -> _Inputs:
    return _Inputs(
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
        key_starts=torch.zeros(num_rows, dtype=torch.int32, device=device),
        key_stops=torch.zeros(num_rows, dtype=torch.int32, device=device),
        tables=torch.zeros(num_rows, width, dtype=torch.int32, device=device),
    )


def _layer_rows(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all rows of the cache from a layer's first key, and from its first value."""
    num_blocks, num_layers, _, block_size, num_kv_heads, head_size = cache.pool.shape
    rows = cache.pool.view(-1, num_kv_heads, head_size)
    num_rows = ((num_blocks - 1) * 2 * num_layers + 1) * block_size
    first_key = 2 * cache.place * block_size
    first_value = first_key + block_size
    return rows[first_key : first_key + num_rows], rows[first_value : first_value + num_rows]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
