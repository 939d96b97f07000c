"""Queries of several tokens by FlashInfer, over the cache or over their own keys."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from attention.flashinfer.memory import PlanMemory, SharedScratch
from attention.flashinfer.pages import Pages, pinned
from attention.flashinfer.plan_arguments import log_loading, plan_arguments
from attention.gpu.batch import SubBatch
from attention.gpu.layer_kernels import LayerCache
from attention.params import AttentionParams, AttentionSpec

__all__ = ["FlashInferPrefill", "PagedPrefill", "RaggedPrefill"]

_HOPPER = 9
_HOPPER_TILE = 128
"""Approximate number of queries per program of the kernels for Hopper."""


class FlashInferPrefill(ABC):
    """A wrapper of the library for each version of its kernels, made when it is first used."""

    fewest_tiles: ClassVar[float] = 1.0
    """The kernels for Hopper are used from so many tiles per multiprocessor on: they are faster,
    but do not split the keys of a query, so that few tiles leave the GPU idle."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        self._params = params
        self._spec = spec
        self._kv_dtype = kv_dtype
        self._scratch = SharedScratch.for_device(spec.device)
        self._arguments = {
            **plan_arguments(params, spec, kv_dtype),
            "head_dim_qk": params.head_size,
            "causal": params.is_causal,
        }
        capability = torch.cuda.get_device_capability(spec.device)
        # The kernels for Hopper do not convert fp8.
        self._has_hopper = capability[0] == _HOPPER and kv_dtype == spec.dtype
        properties = torch.cuda.get_device_properties(spec.device)
        self._num_multiprocessors = properties.multi_processor_count
        self._wrappers: dict[str, tuple[Any, PlanMemory]] = {}  # Any: the library has no types
        self._wrapper: Any = None  # Any: likewise
        self.planned: SubBatch | None = None
        """The argument of the last plan."""

    def _plan(self, sub_batch: SubBatch, **arguments: torch.Tensor) -> None:
        self._wrapper, memory = self._wrapper_for(sub_batch)
        with memory.turn():
            self._wrapper.plan(**arguments, **self._arguments)
        self.planned = sub_batch

    def _wrapper_for(
        self, sub_batch: SubBatch
    ) -> tuple[Any, PlanMemory]:  # Any: the library has no types
        kernel_version = self._kernel_version(sub_batch)
        if kernel_version not in self._wrappers:
            log_loading(kernel_version, self._params, self._spec.dtype, self._kv_dtype)
            wrapper = self._make_wrapper(self._scratch.at_least(), kernel_version)
            self._wrappers[kernel_version] = wrapper, PlanMemory(wrapper)
        return self._wrappers[kernel_version]

    def _kernel_version(self, sub_batch: SubBatch) -> str:
        tiles = int((-(-sub_batch.query_lens // _HOPPER_TILE)).sum()) * self._params.num_heads
        fills_gpu = tiles >= self.fewest_tiles * self._num_multiprocessors
        return "fa3" if self._has_hopper and fills_gpu else "fa2"

    def _query_starts(self, sub_batch: SubBatch) -> torch.Tensor:
        starts = np.concatenate([[0], np.cumsum(sub_batch.query_lens)])
        return pinned(starts, self._spec.device)

    @staticmethod
    @abstractmethod
    def _make_wrapper(scratch: torch.Tensor, kernel_version: str) -> Any:  # Any: no types
        """Return a wrapper of the library."""


class PagedPrefill(FlashInferPrefill):
    """Prefills with a cached context, and queries over the keys of an encoder."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec) -> None:
        super().__init__(params, spec, spec.cache_dtype)
        self._arguments["page_size"] = spec.block_size

    def plan_prefills(self, sub_batch: SubBatch, pages: Pages) -> None:
        """Plan the prefills of a step, without waiting for the GPU."""
        self._plan(
            sub_batch,
            qo_indptr=self._query_starts(sub_batch),
            paged_kv_indptr=pages.starts,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_lens,
        )

    def run_prefills(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend over cached keys."""
        self._wrapper.run(
            query, cache.blocks, k_scale=cache.k_scale, v_scale=cache.v_scale, out=out
        )

    @staticmethod
    def _make_wrapper(scratch: torch.Tensor, kernel_version: str) -> Any:  # Any: no types
        return BatchPrefillWithPagedKVCacheWrapper(scratch, backend=kernel_version)


class RaggedPrefill(FlashInferPrefill):
    """Prefills without context, and encoders: their keys need not be read from the cache."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec) -> None:
        super().__init__(params, spec, spec.dtype)

    def plan_prefills(self, sub_batch: SubBatch) -> None:
        """Plan the sequences of a step that have no context, without waiting for the GPU."""
        starts = self._query_starts(sub_batch)
        self._plan(sub_batch, qo_indptr=starts, kv_indptr=starts)

    def run_prefills(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend over the keys of the same tokens."""
        self._wrapper.run(query, key, value, out=out)

    @staticmethod
    def _make_wrapper(scratch: torch.Tensor, kernel_version: str) -> Any:  # Any: no types
        return BatchPrefillWithRaggedKVCacheWrapper(scratch, backend=kernel_version)
