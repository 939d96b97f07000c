"""Queries of several tokens by FlashInfer, over the cache or over their own keys."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from attention.flashinfer.kernels import announce, plan_arguments
from attention.flashinfer.memory import PlanMemory, SharedScratch
from attention.flashinfer.pages import Pages, pinned
from attention.gpu.batch import Rows
from attention.gpu.group import LayerCache
from attention.params import AttentionParams, AttentionSpec

__all__ = ["FlashInferPrefill", "PagedPrefill", "RaggedPrefill"]

_HOPPER = 9
_HOPPER_TILE = 128
"""Queries of one head that a program of the kernels for Hopper takes, about."""


class FlashInferPrefill(ABC):
    """A wrapper of the library for each generation of its kernels, made when it is used."""

    fewest_tiles: ClassVar[float] = 1.0
    """From so many tiles for each multiprocessor on the kernels for Hopper are used: they are
    the faster ones, but do not split the keys of a query, and few tiles leave the GPU idle."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        self._params = params
        self._spec = spec
        self._kv_dtype = kv_dtype
        self._scratch = SharedScratch.of(spec.device)
        self._arguments = {
            **plan_arguments(params, spec, kv_dtype),
            "head_dim_qk": params.head_size,
            "causal": params.is_causal,
        }
        capability = torch.cuda.get_device_capability(spec.device)
        # The kernels for Hopper convert nothing.
        self._has_hopper = capability[0] == _HOPPER and kv_dtype == spec.dtype
        properties = torch.cuda.get_device_properties(spec.device)
        self._num_multiprocessors = properties.multi_processor_count
        self._wrappers: dict[str, tuple[Any, PlanMemory]] = {}  # Any: the library has no types
        self._wrapper: Any = None  # Any: likewise
        self.planned: Rows | None = None
        """What the last plan was for."""

    def _plan(self, rows: Rows, **arguments: torch.Tensor) -> None:
        self._wrapper, memory = self._wrapper_for(rows)
        with memory.turn():
            self._wrapper.plan(**arguments, **self._arguments)
        self.planned = rows

    def _wrapper_for(self, rows: Rows) -> tuple[Any, PlanMemory]:  # Any: the library has no types
        generation = self._generation(rows)
        if generation not in self._wrappers:
            announce(generation, self._params, self._spec.dtype, self._kv_dtype)
            wrapper = self._make_wrapper(self._scratch.at_least(), generation)
            self._wrappers[generation] = wrapper, PlanMemory(wrapper)
        return self._wrappers[generation]

    def _generation(self, rows: Rows) -> str:
        tiles = int((-(-rows.query_lens // _HOPPER_TILE)).sum()) * self._params.num_heads
        fills_gpu = tiles >= self.fewest_tiles * self._num_multiprocessors
        return "fa3" if self._has_hopper and fills_gpu else "fa2"

    def _query_starts(self, rows: Rows) -> torch.Tensor:
        starts = np.concatenate([[0], np.cumsum(rows.query_lens)])
        return pinned(starts, self._spec.device)

    @staticmethod
    @abstractmethod
    def _make_wrapper(scratch: torch.Tensor, generation: str) -> Any:  # Any: no types
        """Return a wrapper of the library."""


class PagedPrefill(FlashInferPrefill):
    """Chunks, prompts after a cached prefix, and queries over an encoder's keys."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec) -> None:
        super().__init__(params, spec, spec.cache_dtype)
        self._arguments["page_size"] = spec.block_size

    def plan(self, rows: Rows, pages: Pages) -> None:
        """Plan for the prefills of a step; waits for nothing."""
        self._plan(
            rows,
            qo_indptr=self._query_starts(rows),
            paged_kv_indptr=pages.starts,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_lens,
        )

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend over cached keys."""
        self._wrapper.run(
            query, cache.blocks, k_scale=cache.k_scale, v_scale=cache.v_scale, out=out
        )

    @staticmethod
    def _make_wrapper(scratch: torch.Tensor, generation: str) -> Any:  # Any: no types
        return BatchPrefillWithPagedKVCacheWrapper(scratch, backend=generation)


class RaggedPrefill(FlashInferPrefill):
    """Prompts without a prefix, and encoders: keys that need not come from the cache."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec) -> None:
        super().__init__(params, spec, spec.dtype)

    def plan(self, rows: Rows) -> None:
        """Plan the sequences of a step that have no context; waits for nothing."""
        starts = self._query_starts(rows)
        self._plan(rows, qo_indptr=starts, kv_indptr=starts)

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend over the keys of the same tokens."""
        self._wrapper.run(query, key, value, out=out)

    @staticmethod
    def _make_wrapper(scratch: torch.Tensor, generation: str) -> Any:  # Any: no types
        return BatchPrefillWithRaggedKVCacheWrapper(scratch, backend=generation)
