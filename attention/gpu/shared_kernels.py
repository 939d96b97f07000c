"""Attention by the shared Triton kernels, which support every feature."""

from dataclasses import replace

import torch

from attention.gpu.batch import GpuBatch, SubBatch
from attention.gpu.layer_kernels import LayerCache, LayerKernels
from attention.kernels.new_tokens import NewTokens
from attention.kernels.triton.options import AttentionOptions
from attention.kernels.triton.paged_attention import paged_attention
from attention.kernels.triton.paged_decode import PagedDecode, num_scratch_elements
from attention.kernels.triton.ragged_attention import ragged_attention
from attention.kernels.triton.tuning import (
    PagedAttentionTuning,
    default_decode_tuning,
    default_num_splits,
    next_power_of_two,
)
from attention.params import AttentionParams, AttentionSpec

__all__ = ["SharedKernels"]


class SharedKernels(LayerKernels):
    """Runs the shared kernels; only the number of splits of decodes is planned."""

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
        self._planned: SubBatch | None = None
        self._decode: PagedDecode | None = None
        self._scratch = torch.empty(0, dtype=torch.float32, device=spec.device)

    @property
    def providers(self) -> dict[str, str]:
        return {"prefill": "shared", "prefill_ragged": "shared", "decode": "shared"}

    @property
    def takes_new_tokens(self) -> bool:
        size = self.params.head_size
        return size == max(16, next_power_of_two(size)) and self.params.kv_cache_dtype == "auto"

    def plan_step(self, batch: GpuBatch) -> None:
        _, decodes = batch.sub_batches_of(self.params.attention_type)
        if decodes is not None and self.params.is_cached:
            self._plan_decode(decodes)

    def prefill(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        assert sub_batch.block_tables is not None
        paged_attention(
            query,
            cache.blocks,
            query_starts=sub_batch.query_starts,
            seq_lens=sub_batch.seq_lens,
            block_tables=sub_batch.block_tables,
            max_query_len=sub_batch.max_query_len,
            options=self._options_of(cache),
            out=out,
            sinks=sinks,
        )

    def prefill_ragged(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
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
            out=out,
            sinks=sinks,
        )

    def decode(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        cache: LayerCache,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
        new: NewTokens | None = None,
    ) -> None:
        assert sub_batch.block_tables is not None
        if self._planned is not sub_batch:
            self._plan_decode(sub_batch)
        assert self._tuning is not None
        options = self._options_of(cache)
        decode = self._decode
        if decode is None or not decode.fits(query, cache.blocks, out, options, new):
            self._decode = decode = PagedDecode(
                query,
                cache.blocks,
                out,
                seq_lens=sub_batch.seq_lens,
                block_tables=sub_batch.block_tables,
                options=options,
                tuning=self._tuning,
                scratch=self._scratch,
                has_sinks=self.params.has_sinks,
                new=new,
            )
        decode.launch(query, cache.keys, cache.values, out, sinks, new)

    def _plan_decode(self, sub_batch: SubBatch) -> None:
        params = self.params
        num_sequences = len(sub_batch.query_lens)
        num_splits = default_num_splits(
            num_sequences=num_sequences,
            num_kv_heads=params.num_kv_heads,
            max_seq_len=min(sub_batch.max_seq_len, params.sliding_window or sub_batch.max_seq_len),
            num_multiprocessors=self._num_multiprocessors,
        )
        # A kernel is compiled for each number of splits, so only powers of two are used.
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
            # A captured graph holds the address, and all of its steps need the same size.
            assert not (self.is_graph and len(self._scratch))
            size = needed if self.is_graph else next_power_of_two(needed)
            self._scratch = torch.empty(size, dtype=torch.float32, device=self.spec.device)
        self._planned = sub_batch
        self._decode = None

    def _options_of(self, cache: LayerCache) -> AttentionOptions:
        scales = cache.k_scale, cache.v_scale
        if scales not in self._scaled:
            self._scaled[scales] = replace(self._options, k_scale=scales[0], v_scale=scales[1])
        return self._scaled[scales]


def _reach(params: AttentionParams) -> int:
    """Return how many keys a query sees on one side of its own position, -1 for all."""
    return -1 if params.sliding_window is None else params.sliding_window - 1


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
