"""The torch_sdpa backend on a CPU: torch, and kernels in C for decodes and prompts.

Supports every attention type and feature. In a steady state it allocates nothing but the copies
that are written to an fp8 cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

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
from attention.cpu.decode import DecodeChunk, Gather
from attention.cpu.planner import PlanBuffers, encoder_of, make_planner
from attention.fp8 import from_fp8, to_fp8
from attention.kernels.cpu.cache_write import CacheWrite
from attention.kernels.cpu.paged_decode import PagedDecode, PagedPrefill
from attention.params import KV_CACHE_DTYPES, AttentionParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attention.cpu.plan import LayerPlan, Prompts, Span

__all__ = ["TorchSDPABackend", "TorchSDPAMetadataBuilder", "TorchSDPAState"]

_LENGTH_STEP = 32


class TorchSDPAMetadata(AttentionMetadata):
    """The plans of one step."""

    def __init__(self, batch: AttentionBatch, builder: TorchSDPAMetadataBuilder) -> None:
        super().__init__(batch)
        self._builder = builder
        self._layer_plans = builder.plan_layers(batch)
        self._profile_plans: list[LayerPlan] | None = None

    @property
    def prefill_metadata(self) -> TorchSDPAMetadata | None:
        """Return metadata of the prefills alone, with buffers of its own."""
        if not self.num_prefills:
            return None
        return self._builder.alike().build(self._batch.prefills())

    @property
    def decode_metadata(self) -> TorchSDPAMetadata | None:
        """Return metadata of the decodes and the padding, with buffers of its own."""
        if not self.num_decode_tokens:
            return None
        return self._builder.alike().build(self._batch.decodes())

    def advance_step(self) -> TorchSDPAMetadata:
        return self._builder.build(self._batch.advanced(self._builder.spec.block_size))

    def layer_plan(self, layer_index: int) -> LayerPlan:
        """Return the plan of a layer."""
        return self._layer_plans[layer_index]

    def profile_plan(self, layer_index: int) -> LayerPlan:
        """Return the plan of a layer without a cache: every query is a prompt without context."""
        if self._profile_plans is None:
            groups = [
                replace(g, seq_lens=g.query_lens, other_groups=()) for g in self._batch.groups
            ]
            alone = replace(groups[0], other_groups=tuple(groups[1:]))
            self._profile_plans = self._builder.plan_layers(alone, has_cache=False)
        return self._profile_plans[layer_index]

    def write(
        self, layer_index: int, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        params = self._builder.spec.layers[layer_index]
        key, value = key.flatten(1), value.flatten(1)
        if (fp8 := KV_CACHE_DTYPES[params.kv_cache_dtype]) is not None:
            key, value = to_fp8(key, fp8, params.k_scale), to_fp8(value, fp8, params.v_scale)
        plan = self.layer_plan(layer_index).write
        assert plan is not None
        plan.write_layer(key, value, self.cache_views(kv_cache, layer_index))

    def attend(
        self, layer_index: int, inputs: AttentionInputs, kv_cache: torch.Tensor, out: torch.Tensor
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
            if not inputs.is_cached:
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
        views = self._builder.views.views_of(kv_cache)[layer_index]
        assert views is not None
        return views


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder):
    """Plans each step into the same buffers."""

    def __init__(self, spec: AttentionSpec, *, use_kernel: bool = True) -> None:
        """`use_kernel=False` computes decodes by torch, for comparison."""
        super().__init__(spec)
        self._use_kernel = use_kernel
        self.views = CacheViews(spec)
        self.places = spec.cache_layers
        """Each layer's place on the cache's layer axis."""
        groups = spec.cache_groups
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
        keys = [(params.plan_key, group) for params, group in zip(spec.layers, groups, strict=True)]
        distinct = list(dict.fromkeys(keys))
        kernels = [PagedDecode.make(params, spec) if use_kernel else None for params, _ in distinct]
        prefill_kernels = [
            PagedPrefill.make(params, spec) if use_kernel else None for params, _ in distinct
        ]
        self._planners = [
            make_planner(
                params,
                spec=spec,
                buffers=buffers,
                has_kernel=kernel is not None,
                max_prefill_queries=None if prefill is None else prefill.max_queries,
            )
            for (params, _), kernel, prefill in zip(distinct, kernels, prefill_kernels, strict=True)
        ]
        self._kinds = [
            _WriteKind(
                params.attention_type,
                group,
                2 * spec.block_elements // params.block_elements(spec.block_size),
            )
            for params, group in distinct
        ]
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
        self._indices.reset()
        self._biases.reset()
        return TorchSDPAMetadata(batch, self)

    def providers(self) -> dict[str, dict[str, int]]:
        return {
            "prefill": dict(Counter(map(_provider, self.prefill_kernels))),
            "decode": dict(Counter(map(_provider, self.decode_kernels))),
        }

    def alike(self) -> TorchSDPAMetadataBuilder:
        """Return another builder that plans in the same way, with buffers of its own."""
        return TorchSDPAMetadataBuilder(self._spec, use_kernel=self._use_kernel)

    def plan_layers(self, batch: AttentionBatch, *, has_cache: bool = True) -> list[LayerPlan]:
        """Return the plan of each layer; layers of a group with the same plan key share a plan."""
        writes: dict[_WriteKind, WritePlan] = {}
        plans = []
        for kind, planner in zip(self._kinds, self._planners, strict=True):
            group = batch.of_group(kind.group)
            if has_cache and kind not in writes:
                write = self._plan_write(group, kind)
                if write is not None:
                    writes[kind] = write
            plans.append(planner.plan_step(group, writes.get(kind)))
        return [plans[planner] for planner in self._planner_of_layer]

    def _plan_write(self, batch: AttentionBatch, kind: _WriteKind) -> WritePlan | None:
        """Return where layers write keys and values, or None if they do not."""
        if kind.attention_type not in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            return None
        return plan_write(
            batch if kind.attention_type is AttentionType.DECODER else encoder_of(batch),
            block_size=self._spec.block_size,
            parts_per_block=kind.parts_per_block,
            indices=self._indices,
            kernel=self._cache_write,
        )


class _WriteKind(NamedTuple):
    """Layers that write to the same rows of their views."""

    attention_type: AttentionType
    group: int
    parts_per_block: int
    """As in `LayerViews`."""


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
        return "torch_sdpa"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPABackendImpl]:
        return TorchSDPABackendImpl

    @staticmethod
    def get_metadata_cls() -> type[TorchSDPAMetadata]:
        return TorchSDPAMetadata

    @staticmethod
    def get_state_cls() -> type[TorchSDPAState]:
        return TorchSDPAState

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAMetadataBuilder]:
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


class LayerRunner:
    """Runs the parts of a plan for a layer."""

    def __init__(self, params: AttentionParams, sinks: torch.Tensor | None) -> None:
        """`sinks` is `[num_heads]` float32, or None."""
        self._params = params
        self.sinks = sinks
        self._chunk_sinks = self._span_sinks = None
        if sinks is not None:
            heads = (params.num_kv_heads, params.num_queries_per_kv)
            self._chunk_sinks, self._span_sinks = sinks.view(1, *heads, 1), sinks.view(*heads, 1, 1)
        # Keys and values of an fp8 cache are read without their scales. Scaling the scores and the
        # results instead takes fewer multiplications.
        is_fp8 = params.is_cached and KV_CACHE_DTYPES[params.kv_cache_dtype] is not None
        self._scale = params.scale * params.k_scale if is_fp8 else params.scale
        self._value_scale = params.v_scale if is_fp8 else 1.0
        self._query_shape = (-1, params.num_kv_heads, params.num_queries_per_kv, params.head_size)
        self._kv_shape = (-1, params.num_kv_heads, params.head_size)

    def run_plan(
        self,
        plan: LayerPlan,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for all queries that torch computes."""
        for prompts in plan.prompts:
            assert key is not None
            assert value is not None
            self.run_prompts(prompts, query, key, value, out)
        for span in plan.spans:
            self.run_span(span, query, key, value, blocks, out)
        if plan.chunks:
            self.run_chunks(plan.chunks, query, blocks, out)

    def run_chunks(
        self,
        chunks: Sequence[DecodeChunk],
        query: torch.Tensor,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for decodes; the query heads of a KV head are the queries of one call."""
        query, out = query.view(self._query_shape), out.view(self._query_shape)
        for start, stop, tokens, gather, bias in chunks:
            keys, values = gather.read_blocks(blocks)
            if tokens is None:
                result = self._attend(query[start:stop], keys, values, bias, self._chunk_sinks)
                out[start:stop].copy_(result)
            else:
                selected = query.index_select(0, tokens)
                result = self._attend(selected, keys, values, bias, self._chunk_sinks)
                out.index_copy_(0, tokens, result)

    def run_span(
        self,
        span: Span,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        blocks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for one sequence, tile by tile; KV heads are the batch of each call."""
        if isinstance(span.keys, Gather):
            keys, values = (t[0].unsqueeze(1) for t in span.keys.read_blocks(blocks))
        else:
            assert key is not None
            assert value is not None
            keys, values = (
                t[span.keys].view(self._kv_shape).transpose(0, 1).unsqueeze(1) for t in (key, value)
            )
        queries = query.view(self._query_shape).permute(1, 2, 0, 3)
        outs = out.view(self._query_shape).permute(1, 2, 0, 3)
        for tile in span.tiles:
            tokens = slice(tile.query_start, tile.query_stop)
            seen = slice(tile.key_start, tile.key_stop)
            result = self._attend(
                queries[:, :, tokens],
                keys[:, :, seen],
                values[:, :, seen],
                tile.bias,
                self._span_sinks,
            )
            outs[:, :, tokens].copy_(result)

    def run_prompts(
        self,
        prompts: Prompts,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for prompts of equal length in one call."""
        tokens = slice(prompts.start, prompts.start + prompts.num_prompts * prompts.num_tokens)
        params = self._params
        leading = (prompts.num_prompts, prompts.num_tokens)
        query, out = (
            t[tokens].view(*leading, params.num_heads, params.head_size).transpose(1, 2)
            for t in (query, out)
        )
        key, value = (
            t[tokens].view(*leading, params.num_kv_heads, params.head_size).transpose(1, 2)
            for t in (key, value)
        )
        num_spare = -prompts.num_tokens % _LENGTH_STEP
        if num_spare and params.is_causal and query.dtype == torch.bfloat16:
            # oneDNN keeps code for each length; causal queries do not see the padding after them.
            query, key, value = (pad(t, (0, 0, 0, num_spare)) for t in (query, key, value))
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=params.is_causal,
            scale=self._scale,
            enable_gqa=params.num_heads != params.num_kv_heads,
        )
        out.copy_(self._scaled(result)[:, :, : prompts.num_tokens])

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from `[batch, heads, queries, head_size]`; one head of keys broadcasts to all."""
        # Torch has no kernel with a soft cap or with sinks.
        if not self._params.has_plain_softmax:
            return self._scaled(self._attend_explicitly(query, keys, values, bias, sinks))
        if keys.shape[1] != query.shape[1]:
            shape = (-1, query.shape[1], -1, -1)
            keys, values = keys.expand(shape), values.expand(shape)
        result = scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, scale=self._scale
        )
        return self._scaled(result)

    def _scaled(self, result: torch.Tensor) -> torch.Tensor:
        """Return a result multiplied by the scale of cached values."""
        return result if self._value_scale == 1.0 else result.mul_(self._value_scale)

    def _attend_explicitly(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend by computing all scores in float32."""
        batch, num_heads, num_queries, head_size = query.shape
        # Query heads that share a KV head are rows of one matrix product.
        rows = query.float().reshape(batch, keys.shape[1], -1, head_size)
        scores = torch.matmul(rows, keys.float().transpose(2, 3)).mul_(self._scale)
        cap = self._params.soft_cap
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        scores = scores.view(batch, num_heads, num_queries, -1)
        if bias is not None:
            scores.add_(bias)
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        # The weight of a sink is dropped.
        probabilities = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
        probabilities = probabilities.reshape(batch, keys.shape[1], -1, keys.shape[2])
        result = torch.matmul(probabilities, values.float())
        return result.view(query.shape).to(query.dtype)
