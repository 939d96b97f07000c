"""Kernels of the xFormers backend: the library where it supports a layer, else shared kernels."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.gpu.shared_kernels import SharedKernels
from attention.gpu.xformers_unsupported import (
    SMALLEST_TILE,
    unsupported_by_decode,
    unsupported_by_prefill,
)
from attention.kernels.triton.gather_blocks import gather_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.abstract import AttentionInputs
    from attention.gpu.batch import GpuBatch, SubBatch
    from attention.gpu.layer_kernels import LayerCache, LayerSet
    from attention.kernels.arguments import NewTokens
    from attention.params import AttentionParams, AttentionSpec

__all__ = ["PagedDecodes", "RaggedAttention", "XFormersKernels", "attn_bias", "decode_op"]


class _KeyTables(NamedTuple):
    """Where the keys of some sequences are."""

    seq_lens: torch.Tensor
    """`[num_sequences]` int32."""
    max_seq_len: int
    block_tables: torch.Tensor
    """`[num_sequences, width]` int32."""


class XFormersKernels(SharedKernels):
    """FlashAttention 2 for prefills and split-k for decodes, or the shared kernels."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__(layers)
        params, spec = layers.params, layers.spec
        self._ragged: RaggedAttention | None = None
        if unsupported_by_prefill(params) is None:
            self._ragged = RaggedAttention(params)
        self._decodes: PagedDecodes | None = None
        if unsupported_by_decode(params, spec) is None:
            self._decodes = PagedDecodes(params, spec, is_graph=layers.is_graph)

    @property
    def providers(self) -> dict[str, str]:
        prefill = "shared" if self._ragged is None else "xformers"
        decode = "shared" if self._decodes is None else "xformers"
        return {"prefill": prefill, "prefill_ragged": prefill, "decode": decode}

    def plan_step(self, batch: GpuBatch) -> None:
        if self._ragged is not None:
            self._ragged.forget_step()
        if self._decodes is None:
            super().plan_step(batch)
        elif (tables := _key_tables_of(batch, self.params)) is not None:
            self._decodes.plan_decodes(*tables)

    @property
    def takes_new_tokens(self) -> bool:
        return self._decodes is None and super().takes_new_tokens

    def prefill(
        self, sub_batch: SubBatch, inputs: AttentionInputs, cache: LayerCache, out: torch.Tensor
    ) -> None:
        if self._ragged is None:
            super().prefill(sub_batch, inputs, cache, out)
        else:
            self._ragged.prefill(
                sub_batch, inputs.query[sub_batch.tokens], cache, out[sub_batch.tokens]
            )

    def prefill_ragged(
        self, sub_batch: SubBatch, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        if self._ragged is None:
            super().prefill_ragged(sub_batch, inputs, out)
        else:
            self._ragged.prefill_ragged(
                sub_batch, *inputs.rows(sub_batch.tokens), out[sub_batch.tokens]
            )

    def decode(
        self,
        sub_batch: SubBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
        new: NewTokens | None = None,
    ) -> None:
        if self._decodes is None:
            super().decode(sub_batch, inputs, cache, out, new)
        else:
            assert new is None
            self._decodes.run_decodes(inputs.query[sub_batch.tokens], cache, out[sub_batch.tokens])


def _key_tables_of(batch: GpuBatch, params: AttentionParams) -> _KeyTables | None:
    """Return the key tables of the decodes of a step; None without cached keys.

    Decoders read their own sequences, cross attention reads the encoders' sequences, and encoders
    have no blocks.
    """
    _, decodes = batch.sub_batches_of(params.attention_type)
    if decodes is None or not params.is_cached:
        return None
    assert decodes.block_tables is not None
    return _KeyTables(decodes.seq_lens, decodes.max_seq_len, decodes.block_tables)


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
        self._blocks_per_block = 2 * spec.block_elements // params.block_elements(spec.block_size)
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
            tables, self._blocks_per_block, out=inputs.tables[: tables.shape[0], : tables.shape[1]]
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


class _Gather(NamedTuple):
    """The cached keys that are read."""

    starts: torch.Tensor
    """First key, `[num_sequences]` int32."""
    cu_lens: torch.Tensor
    """Gathered keys before each sequence, `[num_sequences + 1]` int32."""
    num_keys: int
    longest: int
    mask: Any  # Any: xFormers declares no types


class RaggedAttention:
    """Attends for queries of several tokens; the first layer of a step makes its masks."""

    def __init__(self, params: AttentionParams) -> None:
        self._params = params
        self._masks: dict[SubBatch, Any] = {}  # Any: xFormers declares no types
        self._gathers: dict[SubBatch, _Gather] = {}

    def forget_step(self) -> None:
        """Forget the masks and gathers of the last step."""
        self._masks.clear()
        self._gathers.clear()

    def prefill_ragged(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend to the keys of each sequence's own tokens, without the cache."""
        if sub_batch not in self._masks:
            info = _lengths_info(sub_batch.query_starts, sub_batch.query_lens)
            self._masks[sub_batch] = self._mask(info, info)
        scale = self._params.scale
        out.copy_(attend(RAGGED_OP, query, key, value, mask=self._masks[sub_batch], scale=scale))

    def prefill(
        self, sub_batch: SubBatch, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend over cached keys, which are gathered and, if fp8, widened."""
        if sub_batch not in self._gathers:
            self._gathers[sub_batch] = self._gather(sub_batch)
        starts, cu_lens, num_keys, longest, mask = self._gathers[sub_batch]
        assert sub_batch.block_tables is not None
        key = query.new_empty(num_keys, self._params.num_kv_heads, self._params.head_size)
        value = torch.empty_like(key)
        # fp8 values are widened exactly. Their scales are applied to the scores and to the result,
        # where they cause no additional rounding.
        gather_blocks(
            cache.blocks,
            block_tables=sub_batch.block_tables,
            starts=starts,
            cu_lens=cu_lens,
            max_len=longest,
            key=key,
            value=value,
        )
        scale = self._params.scale * cache.k_scale
        result = attend(RAGGED_OP, query, key, value, mask=mask, scale=scale)
        if cache.v_scale == 1.0:
            out.copy_(result)
        else:
            torch.mul(result, cache.v_scale, out=out)

    def _gather(self, sub_batch: SubBatch) -> _Gather:
        """Return the keys that any of the queries sees: all, unless there is a window."""
        host_lens = sub_batch.host_seq_lens
        lens, starts = sub_batch.seq_lens, torch.zeros_like(sub_batch.seq_lens)
        window = self._params.sliding_window
        if window is not None:
            host_lens = np.minimum(host_lens, sub_batch.query_lens + np.int32(window - 1))
            query_lens = sub_batch.query_starts[1:] - sub_batch.query_starts[:-1]
            starts = (lens - query_lens - (window - 1)).clamp_(min=0)
            lens = lens - starts
        cu_lens = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=cu_lens[1:])
        query_info = _lengths_info(sub_batch.query_starts, sub_batch.query_lens)
        return _Gather(
            starts=starts,
            cu_lens=cu_lens,
            num_keys=int(host_lens.sum()),
            longest=int(host_lens.max()),
            mask=self._mask(query_info, _lengths_info(cu_lens, host_lens)),
        )

    def _mask(self, queries: Any, keys: Any) -> Any:  # Any: xFormers declares no types
        """Return the mask between sequences of queries and of keys, aligned at their ends."""
        if not self._params.is_causal:
            return attn_bias.BlockDiagonalMask(queries, keys)
        window = self._params.sliding_window
        if window is None:
            return attn_bias.BlockDiagonalCausalFromBottomRightMask(queries, keys)
        return attn_bias.BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            queries, keys, _window_size=window
        )


def _lengths_info(
    starts: torch.Tensor, lens: npt.NDArray[np.int32]
) -> Any:  # Any: xFormers declares no types
    """Return xFormers' record of sequence lengths, without the copy that its constructor makes."""
    return attn_bias._SeqLenInfo(
        seqstart=starts,
        max_seqlen=int(lens.max()),
        min_seqlen=int(lens.min()),
        seqstart_py=[0, *np.cumsum(lens).tolist()],
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    # On import it warns about its extension, which is not needed here, and Triton about its usage.
    log = logging.getLogger("xformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        log.setLevel(level)


with _without_warnings():
    from xformers import _cpp_lib
    from xformers.ops.fmha import attn_bias, flash, triton_splitk
    from xformers.ops.fmha.common import Inputs


def _forget_frames(error: BaseException | None) -> None:
    # xFormers keeps the exception of its extension, and with it all frames of the importing call,
    # which would keep a closed engine on the GPU.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_forget_frames(_cpp_lib._cpp_library_load_exception)


RAGGED_OP: Any = flash.FwOp  # Any: xFormers declares no types
"""Torch's FlashAttention 2, over contiguous keys and values and not blocks."""
_LARGEST_TILE = 64

_PROGRAMS = 8448
"""Programs that fill a large GPU several times over: 64 for each of 132 multiprocessors."""
_FEWEST_KEYS = 128
"""The fewest keys of a split; with fewer, merging it costs more than it saves."""
_MOST_SPLITS = 64


class _SplitDecode(triton_splitk.FwOp):  # type: ignore[misc]  # xFormers declares no types
    """Split-k decode, with a number of splits for tables that are wider than the sequences."""

    # Partial results are padded to a multiple of this, and the padding is not read.
    MAX_BLOCK_M = 1

    @classmethod
    def get_split_k(
        cls,
        batch_size: int,
        num_kv_heads: int,
        num_heads: int,
        num_keys: int,
        num_queries: int,
        page_size: int,
        is_paged: bool = False,
    ) -> int:
        """Return how many programs share the keys of one KV head, a power of two."""
        # The original assumes full tables, and splits wide tables too much.
        wanted = _PROGRAMS // (batch_size * num_kv_heads * num_heads)
        splits = max(1, min(wanted, num_keys // _FEWEST_KEYS, _MOST_SPLITS))
        return 1 << (splits.bit_length() - 1)


_DECODE_OPS: dict[int, Any] = {  # Any: xFormers declares no types
    tile: type(f"_SplitDecode{tile}", (_SplitDecode,), {"BLOCK_N": tile})
    for tile in (SMALLEST_TILE, 2 * SMALLEST_TILE, _LARGEST_TILE)
}


def decode_op(block_size: int) -> Any:  # Any: xFormers declares no types
    """Return the op for decodes over blocks of this size, a multiple of the smallest tile."""
    return next(
        op for tile, op in sorted(_DECODE_OPS.items(), reverse=True) if block_size % tile == 0
    )


def attend(
    op: Any,  # Any: xFormers declares no types
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: Any,  # Any: xFormers declares no types
    scale: float,
) -> torch.Tensor:
    """Return the attention of `query`, `[num_queries, num_heads, head_size]`.

    `key` and `value` are `[num_keys, num_kv_heads, head_size]`. All three may be strided.
    """
    num_kv_heads = key.shape[1]
    num_queries_per_kv = query.shape[1] // num_kv_heads
    # Query heads share a KV head without a copy, by an axis with stride 0.
    key, value = (
        t[None, :, :, None].expand(-1, -1, -1, num_queries_per_kv, -1) for t in (key, value)
    )
    inputs = Inputs(
        query=query.unflatten(1, (num_kv_heads, num_queries_per_kv))[None],
        key=key,
        value=value,
        attn_bias=mask,
        scale=scale,
    )
    result: torch.Tensor = op.apply(inputs, needs_gradient=False)[0]
    return result.reshape(query.shape)
