"""Attention by the shared Triton kernels, which support every feature."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.gpu.decode_schedule import DecodeDivision, DecodeScheduler, SplitCosts
from attention.gpu.layer_kernels import LayerCache, LayerKernels, LayerSet
from attention.kernels.arguments import DecodeItems, NewTokens, num_multiprocessors
from attention.kernels.triton.chunk_attention import paged_attention, ragged_attention
from attention.kernels.triton.paged_decode import PagedDecode
from attention.kernels.triton.tuning import (
    AttentionOptions,
    PagedAttentionTuning,
    default_decode_tuning,
    next_power_of_two,
)
from attention.kernels.triton.write_new_tokens import write_new_tokens

if TYPE_CHECKING:
    from attention.abstract import AttentionInputs
    from attention.gpu.batch import GpuBatch, SubBatch
    from attention.params import AttentionParams, AttentionSpec

__all__ = ["SharedKernels", "TorchSDPAKernels", "decode_division"]

_PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs of a decode that a multiprocessor runs at the same time."""
_SATURATING_PROGRAMS = 1.75
"""Programs of a decode per multiprocessor that together use the whole memory bandwidth."""
_MOST_ROWS_IN_ONE_LAUNCH = 4
"""Most rows of a decode that rotates and writes new tokens itself.

Each program then takes about 2 us longer. Above this number of rows, a separate kernel is faster.
"""

_LARGEST_HEAD = 256
_HEAD_STEP = 8


class SharedKernels(LayerKernels):
    """Runs the shared kernels; decodes are scheduled in each step, and nothing else is planned."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__(layers)
        params, spec = layers.params, layers.spec
        slopes = params.alibi_slopes
        self._options = AttentionOptions(
            scale=params.scale,
            window_left=_reach(params),
            window_right=0 if params.is_causal else _reach(params),
            soft_cap=params.soft_cap,
            alibi_slopes=None
            if slopes is None
            else torch.tensor(slopes, dtype=torch.float32, device=spec.device),
        )
        self._scaled: dict[tuple[float, float], AttentionOptions] = {}
        self._tuning = default_decode_tuning(
            num_queries_per_kv=params.num_queries_per_kv,
            head_size=params.head_size,
            dtype=spec.dtype,
        )
        self._scheduler = layers.schedulers.get(params) or self._make_scheduler(layers)
        self._planned: tuple[SubBatch, DecodeItems] | None = None
        self._decode: PagedDecode | None = None

    def _make_scheduler(self, layers: LayerSet) -> DecodeScheduler:
        params, spec = layers.params, layers.spec
        division = decode_division(params, self._tuning, spec.block_size, spec.device)
        scheduler = DecodeScheduler(
            division, params, layers.memory, spec.device, is_graph=layers.is_graph
        )
        # Without a window, rows of a group share prefixes in the blocks of the group.
        if params.sliding_window is not None:
            layers.schedulers[params] = scheduler
        return scheduler

    @property
    def providers(self) -> dict[str, str]:
        return {"prefill": "shared", "prefill_ragged": "shared", "decode": "shared"}

    @property
    def takes_new_tokens(self) -> bool:
        size = self.params.head_size
        return size == max(16, next_power_of_two(size)) and self.params.kv_cache_dtype == "auto"

    @property
    def items(self) -> DecodeItems | None:
        return None if self._planned is None else self._planned[1]

    def plan_step(self, batch: GpuBatch) -> None:
        _, decodes = batch.sub_batches_of(self.params.attention_type)
        if decodes is not None and self.params.is_cached:
            self._plan_decode(decodes)

    def prefill(
        self, sub_batch: SubBatch, inputs: AttentionInputs, cache: LayerCache, out: torch.Tensor
    ) -> None:
        assert sub_batch.block_tables is not None
        paged_attention(
            inputs.query[sub_batch.tokens],
            cache.blocks,
            query_starts=sub_batch.query_starts,
            seq_lens=sub_batch.seq_lens,
            block_tables=sub_batch.block_tables,
            max_query_len=sub_batch.max_query_len,
            options=self._options_of(cache),
            out=out[sub_batch.tokens],
            sinks=inputs.sinks,
        )

    def prefill_ragged(
        self, sub_batch: SubBatch, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        query, key, value = inputs.rows(sub_batch.tokens)
        if key.stride() != value.stride():
            # The kernel uses the same strides for both.
            key, value = key.contiguous(), value.contiguous()
        ragged_attention(
            query,
            key,
            value,
            query_starts=sub_batch.query_starts,
            kv_starts=sub_batch.query_starts,
            max_query_len=sub_batch.max_query_len,
            options=self._options,
            out=out[sub_batch.tokens],
            sinks=inputs.sinks,
        )

    def decode(
        self,
        sub_batch: SubBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
        new: NewTokens | None = None,
    ) -> None:
        assert sub_batch.block_tables is not None
        query, out = inputs.query[sub_batch.tokens], out[sub_batch.tokens]
        # A graph's decodes are scheduled before each replay, and never while it is captured.
        if self._planned is None or (self._planned[0] is not sub_batch and not self.is_graph):
            self._plan_decode(sub_batch)
        assert self._planned is not None
        if new is not None and len(query) > _MOST_ROWS_IN_ONE_LAUNCH:
            write_new_tokens(query, new, cache.keys, cache.values)
            new = None
        options = self._options_of(cache)
        decode = self._decode
        if decode is None or not decode.fits(query, cache.blocks, out, options, new):
            self._decode = decode = PagedDecode(
                query,
                cache.blocks,
                out,
                block_tables=sub_batch.block_tables,
                items=self._planned[1],
                options=options,
                tuning=self._tuning,
                has_sinks=self.params.has_sinks,
                new=new,
            )
        decode.launch(query, cache.keys, cache.values, out, inputs.sinks, new)

    def _plan_decode(self, sub_batch: SubBatch) -> None:
        tables = sub_batch.host_block_tables
        assert tables is not None
        items = self._scheduler.items_of(sub_batch.host_seq_lens, tables, sub_batch.max_excess)
        self._planned = sub_batch, items
        self._decode = None

    def _options_of(self, cache: LayerCache) -> AttentionOptions:
        scales = cache.k_scale, cache.v_scale
        if scales not in self._scaled:
            self._scaled[scales] = replace(self._options, k_scale=scales[0], v_scale=scales[1])
        return self._scaled[scales]


def decode_division(
    params: AttentionParams, tuning: PagedAttentionTuning, block_size: int, device: torch.device
) -> DecodeDivision:
    """Return how the decodes of layers with these parameters are divided."""
    per_head = num_multiprocessors(device) / params.num_kv_heads
    return DecodeDivision(
        block_size=block_size,
        tile_keys=tuning.tile_keys,
        rows_per_item=max(1, tuning.tile_vectors // params.num_queries_per_kv),
        costs=SplitCosts(
            num_slots=max(1, int(_PROGRAMS_PER_MULTIPROCESSOR * per_head)),
            num_saturating=_SATURATING_PROGRAMS * per_head,
        ),
        window=params.sliding_window,
    )


def _reach(params: AttentionParams) -> int:
    """Return how many keys a query sees on one side of its own position, -1 for all."""
    return -1 if params.sliding_window is None else params.sliding_window - 1


class TorchSDPAKernels(SharedKernels):
    """Sequences of equal length and without context by torch, all else by the shared kernels."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__(layers)
        self._uses_torch = _supports(layers.params, layers.spec)

    @property
    def providers(self) -> dict[str, str]:
        ragged = "torch" if self._uses_torch else "shared"
        return {"prefill": "shared", "prefill_ragged": ragged, "decode": "shared"}

    def prefill_ragged(
        self, sub_batch: SubBatch, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        length = sub_batch.max_query_len
        are_equal = length * len(sub_batch.query_lens) == sub_batch.num_tokens
        is_cut = self.params.sliding_window is not None and length > self.params.sliding_window
        if not self._uses_torch or not are_equal or is_cut:
            super().prefill_ragged(sub_batch, inputs, out)
            return
        query, key, value = (
            t.unflatten(0, (-1, length)).transpose(1, 2) for t in inputs.rows(sub_batch.tokens)
        )
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.params.is_causal,
            scale=self.params.scale,
            enable_gqa=self.params.num_queries_per_kv > 1,
        )
        out[sub_batch.tokens].copy_(result.transpose(1, 2).flatten(0, 1))


def _supports(params: AttentionParams, spec: AttentionSpec) -> bool:
    """Return whether torch has a kernel for these layers that does not store all scores."""
    has_bias = not params.has_plain_softmax or params.alibi_slopes is not None
    # Only kernels for 16 bits support query heads that share a KV head.
    has_kernel = spec.dtype != torch.float32 or params.num_queries_per_kv == 1
    fits = params.head_size <= _LARGEST_HEAD and params.head_size % _HEAD_STEP == 0
    return has_kernel and fits and not has_bias
