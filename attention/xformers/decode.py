"""Decodes by xFormers' split-k op, straight from the paged cache."""

from typing import Any, NamedTuple

import torch

from attention.gpu.layer_kernels import LayerCache
from attention.params import AttentionParams, AttentionSpec
from attention.xformers.library import attend, attn_bias, decode_op

__all__ = ["PagedDecodes"]


class _Inputs(NamedTuple):
    """The tensors that the op reads; a captured graph always reads the same tensors.

    `padded_size` is the number of sequences, padded.
    """

    query_starts: torch.Tensor
    """`[padded_size + 1]` int32."""
    key_starts: torch.Tensor
    """First visible key, `[padded_size]` int32; all zero without a window."""
    key_stops: torch.Tensor
    """`[padded_size]` int32; 0 for padding."""
    tables: torch.Tensor
    """Blocks as the op counts them, `[padded_size, width]` int32."""


class PagedDecodes:
    """Plans one query token for each of some sequences, and computes layer by layer.

    The op is compiled for each number of sequences and each width of the tables. Both are padded
    to powers of two, except in a graph, which has one of each.
    """

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        self._window = params.sliding_window
        self._scale = params.scale
        self._block_size = spec.block_size
        # The op has one table for the keys and values of one layer. It sees a block of the cache of
        # all layers as so many blocks, of which a layer addresses its own.
        self._blocks_per_block = 2 * spec.num_cache_layers
        self._op = decode_op(spec.block_size)
        self._is_graph = is_graph
        self._inputs: _Inputs | None = None
        self._mask: Any = None  # Any: xFormers declares no types

    def plan_decodes(
        self, seq_lens: torch.Tensor, max_seq_len: int, block_tables: torch.Tensor
    ) -> None:
        """Plan for sequences of these lengths, `[num_sequences]`, in the blocks of these tables."""
        padded_size = len(seq_lens)
        width = max(1, -(-max_seq_len // self._block_size))
        if not self._is_graph:
            padded_size, width = _next_power_of_two(padded_size), _next_power_of_two(width)
        if self._inputs is None or not self._is_graph:
            self._inputs = _new_inputs(padded_size, width, seq_lens.device)
            self._mask = self._new_mask(self._inputs)
        inputs = self._inputs
        assert inputs.tables.shape == (padded_size, width)
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

    def run_decodes(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for the planned decodes; the result of a sequence without keys is zero."""
        assert self._inputs is not None
        padded_size = len(self._inputs.key_stops)
        if len(query) < padded_size:
            padded = query.new_zeros(padded_size, *query.shape[1:])
            padded[: len(query)].copy_(query)
            query = padded
        key, value = _layer_slots(cache)
        result = attend(self._op, query, key, value, mask=self._mask, scale=self._scale)
        out.copy_(result[: len(out)])

    def _new_mask(self, inputs: _Inputs) -> Any:  # Any: xFormers declares no types
        """Return a mask of tensors that are filled later.

        The lists on the host describe full tables, as the library's constructors do; the op reads
        tensors and shapes only.
        """
        padded_size, width = inputs.tables.shape
        padded_len = width * self._block_size
        query_info = attn_bias._SeqLenInfo(
            seqstart=inputs.query_starts,
            max_seqlen=1,
            min_seqlen=1,
            seqstart_py=list(range(padded_size + 1)),
        )
        if self._window is None:
            key_info = attn_bias._PaddedSeqLenInfo(
                seqstart=inputs.key_starts,
                max_seqlen=padded_len,
                min_seqlen=padded_len,
                seqstart_py=list(range(0, padded_size * padded_len + 1, padded_len)),
                seqlen=inputs.key_stops,
                seqlen_py=[padded_len] * padded_size,
                padding=padded_len,
            )
            mask_type = attn_bias.PagedBlockDiagonalPaddedKeysMask
        else:
            # In a paged mask the lengths of the gappy kind are end positions.
            key_info = attn_bias._GappySeqInfo(
                seqstart=inputs.key_starts,
                max_seqlen=padded_len,
                min_seqlen=padded_len,
                seqstart_py=[0] * padded_size,
                seqlen=inputs.key_stops,
                seqlen_py=[padded_len] * padded_size,
            )
            mask_type = attn_bias.PagedBlockDiagonalGappyKeysMask
        return mask_type(
            q_seqinfo=query_info,
            k_seqinfo=key_info,
            block_tables=inputs.tables,
            page_size=self._block_size,
        )


def _new_inputs(padded_size: int, width: int, device: torch.device) -> _Inputs:
    return _Inputs(
        query_starts=torch.arange(padded_size + 1, dtype=torch.int32, device=device),
        key_starts=torch.zeros(padded_size, dtype=torch.int32, device=device),
        key_stops=torch.zeros(padded_size, dtype=torch.int32, device=device),
        tables=torch.zeros(padded_size, width, dtype=torch.int32, device=device),
    )


def _layer_slots(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all slots of the cache from a layer's first key, and from its first value."""
    num_blocks, num_layers, _, block_size, num_kv_heads, head_size = cache.pool.shape
    slots = cache.pool.view(-1, num_kv_heads, head_size)
    num_slots = ((num_blocks - 1) * 2 * num_layers + 1) * block_size
    first_key = 2 * cache.place * block_size
    first_value = first_key + block_size
    return slots[first_key : first_key + num_slots], slots[first_value : first_value + num_slots]


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
