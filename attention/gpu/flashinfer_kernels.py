"""The kernels of the FlashInfer and hybrid backends for layers that the library supports."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from flashinfer.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

from attention.gpu.flashinfer_pages import Pages, PageUploader, pinned, plan_arguments
from attention.gpu.layer_kernels import LayerCache, LayerKernels, LayerSet
from attention.gpu.shared_kernels import SharedKernels
from attention.params import AttentionParams, AttentionSpec, AttentionType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attention.abstract import AttentionInputs
    from attention.gpu.batch import GpuBatch, SubBatch
    from attention.kernels.arguments import DecodeItems, NewTokens

__all__ = ["FlashInferKernels", "FlashInferPrefill", "HybridKernels"]

logger = logging.getLogger(__name__)

# The library's recommendation. Eager steps need less, graphs of large batches may need more.
_SCRATCH_BYTES = 128 << 20
# The prefill kernels, on tensor cores: they support any number of query heads per KV head, and
# read fastest.
_KERNEL_VERSION = "fa2"
# Bytes of a buffer that alignment may use up.
_PLAN_SLACK = 4096

_HOPPER = 9
_HOPPER_TILE = 128
"""Approximate number of queries per program of the kernels for Hopper."""


class _FlashInferPrefills(LayerKernels):
    """Prefills by the library; the prefills of a step are planned ahead, others when they run."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        """`uploader` is shared by all layers that see the same keys."""
        super().__init__(layers)
        params, spec = layers.params, layers.spec
        self._uploader = uploader
        self._is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        self._is_encoder = params.attention_type is AttentionType.ENCODER
        self._paged = PagedPrefill(params, spec)
        self._ragged = RaggedPrefill(params, spec)

    def plan_step(self, batch: GpuBatch) -> None:
        prefills, _ = batch.sub_batches_of(self.params.attention_type)
        if not self.params.is_cached:
            ragged = batch.encoders if self._is_encoder else prefills
            if ragged is not None:
                self._ragged.plan_prefills(ragged)
        elif prefills is not None:
            self._plan_cached(prefills)

    def prefill(
        self, sub_batch: SubBatch, inputs: AttentionInputs, cache: LayerCache, out: torch.Tensor
    ) -> None:
        if self._paged.planned is not sub_batch:
            self._paged.plan_prefills(sub_batch, self._uploader.pages_of(sub_batch))
        self._paged.run_prefills(inputs.query[sub_batch.tokens], cache, out[sub_batch.tokens])

    def prefill_ragged(
        self, sub_batch: SubBatch, inputs: AttentionInputs, out: torch.Tensor
    ) -> None:
        if self._ragged.planned is not sub_batch:
            self._ragged.plan_prefills(sub_batch)
        self._ragged.run_prefills(*inputs.rows(sub_batch.tokens), out[sub_batch.tokens])

    def _plan_cached(self, prefills: SubBatch) -> None:
        is_same_dtype = self.spec.cache_dtype == self.spec.dtype
        if prefills.has_no_context and not self._is_cross and is_same_dtype:
            self._ragged.plan_prefills(prefills)
        elif self._has_blocks(prefills):
            self._paged.plan_prefills(prefills, self._uploader.pages_of(prefills))

    def _has_blocks(self, sub_batch: SubBatch) -> bool:
        """Return whether the keys have blocks: in a profile run they have none."""
        assert sub_batch.host_block_tables is not None
        num_slots: int = sub_batch.host_block_tables.shape[1] * self.spec.block_size
        return int(sub_batch.host_seq_lens.max(initial=0)) <= num_slots


class FlashInferKernels(_FlashInferPrefills):
    """Prefills and decodes by the library."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        super().__init__(layers, uploader)
        self._decode = FlashInferDecode(layers.params, layers.spec, is_graph=layers.is_graph)

    @property
    def providers(self) -> dict[str, str]:
        return dict.fromkeys(("prefill", "prefill_ragged", "decode"), "flashinfer")

    def plan_step(self, batch: GpuBatch) -> None:
        super().plan_step(batch)
        _, decodes = batch.sub_batches_of(self.params.attention_type)
        if self.params.is_cached and decodes is not None and self._has_blocks(decodes):
            self._decode.plan_decodes(decodes, self._uploader.pages_of(decodes))

    def decode(
        self,
        sub_batch: SubBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
        new: NewTokens | None = None,
    ) -> None:
        assert new is None
        # A graph's plan is made before each replay, and never while it is captured.
        if self._decode.planned is not sub_batch and not self.is_graph:
            self._decode.plan_decodes(sub_batch, self._uploader.pages_of(sub_batch))
        self._decode.run_decodes(inputs.query[sub_batch.tokens], cache, out[sub_batch.tokens])


class HybridKernels(_FlashInferPrefills):
    """Prefills by the library; decodes by the shared kernel, which needs no plan of pages."""

    def __init__(self, layers: LayerSet, uploader: PageUploader) -> None:
        super().__init__(layers, uploader)
        self._shared = SharedKernels(layers)

    @property
    def providers(self) -> dict[str, str]:
        return {"prefill": "flashinfer", "prefill_ragged": "flashinfer", "decode": "shared"}

    @property
    def takes_new_tokens(self) -> bool:
        return self._shared.takes_new_tokens

    @property
    def items(self) -> DecodeItems | None:
        return self._shared.items

    def plan_step(self, batch: GpuBatch) -> None:
        super().plan_step(batch)
        self._shared.plan_step(batch)

    def decode(
        self,
        sub_batch: SubBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
        new: NewTokens | None = None,
    ) -> None:
        self._shared.decode(sub_batch, inputs, cache, out, new)


def log_loading(
    kernel_version: str, params: AttentionParams, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Log once that kernels are loaded, since compiling them may take a while."""
    features = [f"head size {params.head_size}", f"{dtype} queries", f"{kv_dtype} keys"]
    features += ["sliding window"] if params.sliding_window is not None else []
    features += ["soft cap"] if params.soft_cap is not None else []
    _log_once(kernel_version, ", ".join(features))


@cache
def _log_once(kernel_version: str, features: str) -> None:
    logger.info(
        "Loading FlashInfer's %s kernels for %s; compiling them for the first time takes up to a "
        "minute.",
        kernel_version,
        features,
    )


class SharedScratch:
    """Scratch for sequences with split keys, shared by all wrappers of a device.

    Wrappers run on one stream, one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def for_device(device: torch.device) -> SharedScratch:
        """Return the scratch of a device; create it if none is alive."""
        index = torch.cuda.current_device() if device.index is None else device.index
        scratch = _scratches.get(index)
        if scratch is None:
            scratch = _scratches[index] = SharedScratch(torch.device("cuda", index))
        return scratch

    def at_least(self, num_bytes: int = 0) -> torch.Tensor:
        """Return a buffer of that size or more; buffers returned earlier stay valid."""
        num_bytes = max(num_bytes, _SCRATCH_BYTES)
        if num_bytes > len(self._buffer):
            # The library expects zeros on first use.
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer


# Shared by builders that do not know each other, one builder per captured batch size.
_scratches: WeakValueDictionary[int, SharedScratch] = WeakValueDictionary()


class PlanMemory:
    """Two alternating pinned buffers for the plans of one wrapper.

    A plan is copied to the device after all work that is queued there. The library writes every
    plan to the same host buffer, and would overwrite it before it is copied.
    """

    def __init__(self, wrapper: Any) -> None:  # Any: the library has no types
        self._wrapper = wrapper
        first = wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, torch.empty_like(first, pin_memory=True)]
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the wrapper plan into the buffer that the last plan did not use."""
        self._turn = 1 - self._turn
        # Waits only if the host is two plans ahead of the GPU.
        self._copied[self._turn].synchronize()
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        yield
        self._copied[self._turn].record()


class FlashInferDecode:
    """A decode wrapper of the library, planned for each step."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        self._is_graph = is_graph
        self._scratch = SharedScratch.for_device(spec.device)
        self._arguments = {
            **plan_arguments(params, spec, spec.cache_dtype),
            "head_dim": params.head_size,
            "page_size": spec.block_size,
        }
        self._params = params
        self._spec = spec
        self._wrapper: Any = None  # Any: the library has no types
        self._memory: PlanMemory | None = None
        self.planned: SubBatch | None = None
        """The argument of the last plan."""

    def plan_decodes(self, sub_batch: SubBatch, pages: Pages) -> None:
        """Plan the decodes of a step, without waiting for the GPU."""
        if self._wrapper is None:
            log_loading(_KERNEL_VERSION, self._params, self._spec.dtype, self._spec.cache_dtype)
            self._wrapper = self._make_wrapper(pages)
            self._memory = PlanMemory(self._wrapper)
            plan = self._wrapper.plan
        elif self._is_graph:
            # The pages are in the graph's buffers: only the schedule has to be made.
            plan = partial(fast_decode_plan, self._wrapper, global_override_indptr_cpu=pages.starts)
        else:
            plan = self._wrapper.plan
        assert self._memory is not None
        with self._memory.turn():
            plan(
                indptr=pages.starts,
                indices=pages.indices,
                last_page_len=pages.last_lens,
                **self._arguments,
            )
        self.planned = sub_batch

    def run_decodes(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query of each sequence; the result of a sequence without keys is zero."""
        self._wrapper.run(
            query, cache.blocks, k_scale=cache.k_scale, v_scale=cache.v_scale, out=out
        )

    def _make_wrapper(self, pages: Pages) -> Any:  # Any: the library has no types
        make = partial(
            BatchDecodeWithPagedKVCacheWrapper,
            self._scratch.at_least(),
            use_tensor_cores=True,
            backend=_KERNEL_VERSION,
        )
        if pages.graph is None:
            return make()
        wrapper = make(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=pages.graph.starts,
            paged_kv_indices_buffer=pages.graph.indices,
            paged_kv_last_page_len_buffer=pages.graph.last_lens,
        )
        # The size depends on the batch size alone. By default, each graph allocates 8 MiB for its
        # plans and uses a few KiB.
        scratch_bytes, plan_bytes = wrapper.workspace_size(
            pages.starts, pages.indices, pages.last_lens, **self._arguments
        )
        plans = torch.empty(
            plan_bytes + _PLAN_SLACK, dtype=torch.uint8, device=pages.graph.starts.device
        )
        wrapper.reset_workspace_buffer(self._scratch.at_least(scratch_bytes + _PLAN_SLACK), plans)
        return wrapper


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
