"""The torch_sdpa backend on a CPU: torch, and kernels in C for decodes and prompts.

Supports every attention type and feature. In a steady state it allocates nothing but the copies
that are written to an fp8 cache.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch

from attention.abstract import (
    AttentionBackend,
    AttentionBatch,
    AttentionImpl,
    AttentionInputs,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    EagerAttentionState,
)
from attention.cpu.buffers import CacheViews, LayerViews, Scratch, StepArrays, WritePlan, plan_write
from attention.cpu.plan import LayerPlan
from attention.cpu.planner import PlanBuffers, encoder_of, make_planner
from attention.cpu.run import LayerRunner
from attention.fp8 import from_fp8, to_fp8
from attention.kernels.cpu.cache_write import CacheWrite
from attention.kernels.cpu.paged_decode import PagedDecode, PagedPrefill
from attention.params import KV_CACHE_DTYPES

__all__ = [
    "TorchSDPABackend",
    "TorchSDPABackendImpl",
    "TorchSDPAMetadata",
    "TorchSDPAMetadataBuilder",
    "TorchSDPAState",
]


class TorchSDPAMetadata(AttentionMetadata):
    """The plans of one step."""

    def __init__(self, batch: AttentionBatch, builder: "TorchSDPAMetadataBuilder") -> None:
        super().__init__(batch)
        self._builder = builder
        self._layer_plans = builder.plan_layers(batch)
        self._profile_plans: list[LayerPlan] | None = None

    @property
    def prefill_metadata(self) -> "TorchSDPAMetadata | None":
        """Return metadata of the prefills alone, with buffers of its own."""
        if not self.num_prefills:
            return None
        return self._builder.alike().build(self._batch.prefills())

    @property
    def decode_metadata(self) -> "TorchSDPAMetadata | None":
        """Return metadata of the decodes and the padding, with buffers of its own."""
        if not self.num_decode_tokens:
            return None
        return self._builder.alike().build(self._batch.decodes())

    def advance_step(self) -> "TorchSDPAMetadata":
        """Return the metadata of the next decode-only step; this metadata becomes invalid."""
        return self._builder.build(self._batch.advanced(self._builder.spec.block_size))

    def layer_plan(self, layer_index: int) -> LayerPlan:
        """Return the plan of a layer."""
        return self._layer_plans[layer_index]

    def profile_plan(self, layer_index: int) -> LayerPlan:
        """Return the plan of a layer without a cache: every query is a prompt without context."""
        if self._profile_plans is None:
            alone = replace(self._batch, seq_lens=self._batch.query_lens)
            self._profile_plans = self._builder.plan_layers(alone, has_cache=False)
        return self._profile_plans[layer_index]

    def attend(
        self,
        layer_index: int,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        params = self._builder.spec.layers[layer_index]
        query, out = inputs.query.flatten(1), out.flatten(1)
        key, value = (
            None if heads is None else heads.flatten(1) for heads in (inputs.key, inputs.value)
        )
        blocks = kv_cache
        has_cache = kv_cache.numel() > 0
        plan = self.layer_plan(layer_index) if has_cache else self.profile_plan(layer_index)
        stored = key, value
        fp8 = KV_CACHE_DTYPES[params.kv_cache_dtype] if params.is_cached else None
        if fp8 is not None and key is not None and value is not None:
            stored = to_fp8(key, fp8, params.k_scale), to_fp8(value, fp8, params.v_scale)
            if plan.prompts or plan.spans:
                # This step must read the same rounded values as later steps.
                key, value = (from_fp8(x, fp8, query.dtype) for x in stored)
        if plan.write is not None:
            views = self.cache_views(kv_cache, layer_index)
            blocks = views.blocks
            plan.write.write_layer(*stored, views)
        runner = self._builder.runner(layer_index, inputs.sinks)
        runner.run_plan(plan, query, key, value, blocks, out)
        self._run_kernels(plan, query, kv_cache, layer_index, out, sinks=inputs.sinks)
        if plan.keyless_tokens is not None:
            out.index_fill_(0, plan.keyless_tokens, 0)
        if plan.num_padding:
            out[-plan.num_padding :].zero_()

    def _run_kernels(
        self,
        plan: LayerPlan,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer_index: int,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend for the prefills and decodes of a layer that kernels compute."""
        builder, params = self._builder, self._builder.spec.layers[layer_index]
        place, scales = builder.places[layer_index], (params.k_scale, params.v_scale)
        if plan.prefills is not None:
            prefill = builder.prefill_kernels[layer_index]
            assert prefill is not None
            assert place is not None
            prefill.run_prefills(
                plan.prefills, query, kv_cache, place, out, scales=scales, sinks=sinks
            )
        if plan.decodes is not None:
            decode = builder.decode_kernels[layer_index]
            assert decode is not None
            assert place is not None
            decode.run_decodes(
                plan.decodes, query, kv_cache, place, out, scales=scales, sinks=sinks
            )

    def cache_views(self, kv_cache: torch.Tensor, layer_index: int) -> LayerViews:
        """Return the cache views of a cached layer."""
        place = self._builder.places[layer_index]
        assert place is not None
        return self._builder.views.views_of(kv_cache)[place]


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder):
    """Plans each step into the same buffers."""

    def __init__(self, spec: AttentionSpec, *, use_kernel: bool = True) -> None:
        """`use_kernel=False` computes decodes by torch, for comparison."""
        super().__init__(spec)
        self._use_kernel = use_kernel
        self.views = CacheViews(spec)
        self.places = spec.cache_layers
        """Each layer's place on the cache's layer axis."""
        self._num_cache_layers = spec.num_cache_layers
        self._indices = StepArrays(torch.int64)
        self._biases = StepArrays(torch.float32)
        buffers = PlanBuffers(
            indices=self._indices,
            biases=self._biases,
            scratch=Scratch(spec.dtype),
            stored=Scratch(torch.uint8),
            pairs=Scratch(torch.int32),
        )
        self._cache_write = CacheWrite.make() if use_kernel else None
        keys = [params.plan_key for params in spec.layers]
        distinct = list(dict.fromkeys(keys))
        kernels = [PagedDecode.make(params, spec) if use_kernel else None for params in distinct]
        prefill_kernels = [
            PagedPrefill.make(params, spec) if use_kernel else None for params in distinct
        ]
        self._planners = [
            make_planner(
                params,
                spec=spec,
                buffers=buffers,
                has_kernel=kernel is not None,
                max_prefill_queries=None if prefill is None else prefill.max_queries,
            )
            for params, kernel, prefill in zip(distinct, kernels, prefill_kernels, strict=True)
        ]
        self._types = [params.attention_type for params in distinct]
        self._planner_of_layer = [distinct.index(key) for key in keys]
        self.decode_kernels = [kernels[planner] for planner in self._planner_of_layer]
        """The decode kernel of each layer, or None."""
        self.prefill_kernels = [prefill_kernels[planner] for planner in self._planner_of_layer]
        """The prefill kernel of each layer, or None."""
        self._runners: dict[int, LayerRunner] = {}

    def runner(self, layer_index: int, sinks: torch.Tensor | None) -> LayerRunner:
        """Return what computes a layer by torch."""
        runner = self._runners.get(layer_index)
        if runner is None or runner.sinks is not sinks:
            runner = LayerRunner(self._spec.layers[layer_index], sinks)
            self._runners[layer_index] = runner
        return runner

    def build(self, batch: AttentionBatch) -> TorchSDPAMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        self._indices.reset()
        self._biases.reset()
        return TorchSDPAMetadata(batch, self)

    def providers(self) -> dict[str, dict[str, int]]:
        """Return how many layers each provider of kernels computes, by part of a step."""
        return {
            "prefill": dict(Counter(map(_provider, self.prefill_kernels))),
            "decode": dict(Counter(map(_provider, self.decode_kernels))),
        }

    def alike(self) -> "TorchSDPAMetadataBuilder":
        """Return another builder that plans in the same way, with buffers of its own."""
        return TorchSDPAMetadataBuilder(self._spec, use_kernel=self._use_kernel)

    def plan_layers(self, batch: AttentionBatch, *, has_cache: bool = True) -> list[LayerPlan]:
        """Return the plan of each layer; layers with the same plan key share a plan."""
        writes: dict[AttentionType, WritePlan] = {}
        plans = []
        for kind, planner in zip(self._types, self._planners, strict=True):
            if has_cache and kind not in writes:
                write = self._plan_write(batch, kind)
                if write is not None:
                    writes[kind] = write
            plans.append(planner.plan_step(batch, writes.get(kind)))
        return [plans[planner] for planner in self._planner_of_layer]

    def _plan_write(self, batch: AttentionBatch, kind: AttentionType) -> WritePlan | None:
        """Return where layers of a type write keys and values, or None if they do not."""
        if kind not in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            return None
        return plan_write(
            batch if kind is AttentionType.DECODER else encoder_of(batch),
            block_size=self._spec.block_size,
            num_layers=self._num_cache_layers,
            indices=self._indices,
            kernel=self._cache_write,
        )


def _provider(kernel: PagedPrefill | PagedDecode | None) -> str:
    return "torch" if kernel is None else "native"


class TorchSDPAState(EagerAttentionState):
    """Empty: shapes depend on the lengths of sequences, so no step can be captured."""


class TorchSDPABackendImpl(AttentionImpl):
    """One layer's attention."""

    def _attend(
        self,
        metadata: AttentionMetadata,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        metadata.attend(self._layer_index, inputs, kv_cache, out)


class TorchSDPABackend(AttentionBackend):
    """Attention by kernels in C and by torch, on a CPU."""

    @staticmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""
        return "torch_sdpa"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPABackendImpl]:
        """Return the class of a layer's computation."""
        return TorchSDPABackendImpl

    @staticmethod
    def get_metadata_cls() -> type[TorchSDPAMetadata]:
        """Return the class of a step's metadata."""
        return TorchSDPAMetadata

    @staticmethod
    def get_state_cls() -> type[TorchSDPAState]:
        """Return the class of a worker's state."""
        return TorchSDPAState

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAMetadataBuilder]:
        """Return the class that builds metadata."""
        return TorchSDPAMetadataBuilder

    @classmethod
    def _problems(cls, spec: AttentionSpec) -> Iterator[str]:
        if spec.device.type != "cpu":
            yield f"device is {spec.device.type}, but must be cpu"
        if spec.dtype == torch.float16:
            yield (
                "dtype is torch.float16, which CPUs compute hundreds of times slower than "
                "bfloat16; use bfloat16 or float32"
            )
        elif spec.dtype not in (torch.bfloat16, torch.float32):
            yield f"dtype is {spec.dtype}, but must be bfloat16 or float32"
