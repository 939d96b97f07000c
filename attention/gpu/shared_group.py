"""Attention by the shared kernels alone: every feature, and what serves where no library does."""

from dataclasses import replace

import torch

from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import GpuGroup, LayerCache
from attention.kernels.triton.options import AttentionOptions
from attention.kernels.triton.paged_attention import paged_attention
from attention.kernels.triton.paged_decode import num_scratch_elements, paged_decode
from attention.kernels.triton.ragged_attention import ragged_attention
from attention.kernels.triton.tuning import (
    PagedAttentionTuning,
    default_decode_tuning,
    default_num_splits,
    next_power_of_two,
)
from attention.params import AttentionParams, AttentionSpec

__all__ = ["SharedGroup"]


class SharedGroup(GpuGroup):
    """Runs the shared kernels; all that it plans is how decodes are split."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        super().__init__(params, spec, is_graph=is_graph)
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
        self._num_multiprocessors = _num_multiprocessors(spec.device)
        self._tuning: PagedAttentionTuning | None = None
        self._planned: Rows | None = None
        self._scratch = torch.empty(0, dtype=torch.float32, device=spec.device)

    @property
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step."""
        return {"prefill": "shared", "prefill_ragged": "shared", "decode": "shared"}

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        _, decodes = batch.rows_of(self.params.attention_type)
        if decodes is not None and self.params.is_cached:
            self._plan_decode(decodes)

    def prefill(
        self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""
        assert rows.block_tables is not None
        paged_attention(
            query,
            cache.blocks,
            query_starts=rows.query_starts,
            seq_lens=rows.seq_lens,
            block_tables=rows.block_tables,
            max_query_len=rows.max_query_len,
            options=self._options_of(cache),
            out=out,
        )

    def prefill_ragged(
        self,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for sequences whose keys are those of their own tokens."""
        if key.stride() != value.stride():
            # The kernel finds both by the same strides.
            key, value = key.contiguous(), value.contiguous()
        ragged_attention(
            query,
            key,
            value,
            query_starts=rows.query_starts,
            kv_starts=rows.query_starts,
            max_query_len=rows.max_query_len,
            options=self._options,
            out=out,
        )

    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
        assert rows.block_tables is not None
        if self._planned is not rows:
            self._plan_decode(rows)
        assert self._tuning is not None
        paged_decode(
            query,
            cache.blocks,
            seq_lens=rows.seq_lens,
            block_tables=rows.block_tables,
            options=self._options_of(cache),
            tuning=self._tuning,
            scratch=self._scratch,
            out=out,
        )

    def _plan_decode(self, rows: Rows) -> None:
        params = self.params
        num_sequences = len(rows.query_lens)
        num_splits = default_num_splits(
            num_sequences=num_sequences,
            num_kv_heads=params.num_kv_heads,
            max_seq_len=min(rows.max_seq_len, params.sliding_window or rows.max_seq_len),
            num_multiprocessors=self._num_multiprocessors,
        )
        # Every number of splits is a kernel that must be compiled, so there are few of them.
        self._tuning = default_decode_tuning(
            num_queries_per_kv=params.num_queries_per_kv,
            head_size=params.head_size,
            dtype=self.spec.dtype,
            num_splits=next_power_of_two(num_splits),
        )
        needed = num_scratch_elements(
            num_sequences=num_sequences,
            num_heads=params.num_heads,
            head_size=params.head_size,
            num_splits=self._tuning.num_splits,
        )
        if needed > len(self._scratch):
            # A captured graph holds the address: all of its steps need the same.
            assert not (self.is_graph and len(self._scratch))
            size = needed if self.is_graph else next_power_of_two(needed)
            self._scratch = torch.empty(size, dtype=torch.float32, device=self.spec.device)
        self._planned = rows

    def _options_of(self, cache: LayerCache) -> AttentionOptions:
        scales = cache.k_scale, cache.v_scale
        if scales not in self._scaled:
            self._scaled[scales] = replace(self._options, k_scale=scales[0], v_scale=scales[1])
        return self._scaled[scales]


def _reach(params: AttentionParams) -> int:
    """Return how many keys a query sees on one side beside its own position, -1 for all."""
    return -1 if params.sliding_window is None else params.sliding_window - 1


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
