"""Decodes by FlashInfer, eager and in captured graphs."""

from functools import partial
from typing import Any

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

from attention.flashinfer.kernels import announce, plan_arguments
from attention.flashinfer.memory import PlanMemory, SharedScratch
from attention.flashinfer.pages import Pages
from attention.gpu.batch import Rows
from attention.gpu.group import LayerCache
from attention.params import AttentionParams, AttentionSpec

__all__ = ["FlashInferDecode"]

# The kernels of prompts, on tensor cores: they have every group size and read fastest.
_GENERATION = "fa2"
# Bytes that alignment may take of a buffer.
_PLAN_SLACK = 4096


class FlashInferDecode:
    """One wrapper of the library, planned for one step after the other."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        self._is_graph = is_graph
        self._scratch = SharedScratch.of(spec.device)
        self._arguments = {
            **plan_arguments(params, spec, spec.cache_dtype),
            "head_dim": params.head_size,
            "page_size": spec.block_size,
        }
        self._params = params
        self._spec = spec
        self._wrapper: Any = None  # Any: the library has no types
        self._memory: PlanMemory | None = None
        self.planned: Rows | None = None
        """What the last plan was for."""

    def plan(self, rows: Rows, pages: Pages) -> None:
        """Plan for the decodes of a step; waits for nothing."""
        if self._wrapper is None:
            announce(_GENERATION, self._params, self._spec.dtype, self._spec.cache_dtype)
            self._wrapper = self._make_wrapper(pages)
            self._memory = PlanMemory(self._wrapper)
            plan = self._wrapper.plan
        elif self._is_graph:
            # The pages are in the graph's buffers: only the schedule is left to do.
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
        self.planned = rows

    def run(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query of each sequence; sequences without keys come out as zeros."""
        self._wrapper.run(
            query, cache.blocks, k_scale=cache.k_scale, v_scale=cache.v_scale, out=out
        )

    def _make_wrapper(self, pages: Pages) -> Any:  # Any: the library has no types
        make = partial(
            BatchDecodeWithPagedKVCacheWrapper,
            self._scratch.at_least(),
            use_tensor_cores=True,
            backend=_GENERATION,
        )
        if pages.graph is None:
            return make()
        wrapper = make(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=pages.graph.starts,
            paged_kv_indices_buffer=pages.graph.indices,
            paged_kv_last_page_len_buffer=pages.graph.last_lens,
        )
        # What a graph needs follows from its batch size alone. By default each takes 8 MiB for
        # its plans, of which it uses some KiB.
        scratch_bytes, plan_bytes = wrapper.workspace_size(
            pages.starts, pages.indices, pages.last_lens, **self._arguments
        )
        plans = torch.empty(
            plan_bytes + _PLAN_SLACK, dtype=torch.uint8, device=pages.graph.starts.device
        )
        wrapper.reset_workspace_buffer(self._scratch.at_least(scratch_bytes + _PLAN_SLACK), plans)
        return wrapper
