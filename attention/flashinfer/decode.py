"""Decodes by FlashInfer, eager and in captured graphs."""

from functools import partial
from typing import Any

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

from attention.flashinfer.memory import PlanMemory, SharedScratch
from attention.flashinfer.pages import Pages
from attention.flashinfer.plan_arguments import log_loading, plan_arguments
from attention.gpu.batch import SubBatch
from attention.gpu.layer_kernels import LayerCache
from attention.params import AttentionParams, AttentionSpec

__all__ = ["FlashInferDecode"]

# The prefill kernels, on tensor cores: they support any number of query heads per KV head, and
# read fastest.
_KERNEL_VERSION = "fa2"
# Bytes of a buffer that alignment may use up.
_PLAN_SLACK = 4096


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
