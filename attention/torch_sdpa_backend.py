"""The backend that needs torch alone, on CPUs and GPUs.

Owns decoder attention over the paged cache by `scaled_dot_product_attention`. Does not repeat
keys or values for a group of query heads, and does not allocate in a steady state.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from attention.abstract import (
    AttentionBackend,
    AttentionBatch,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionParams,
    AttentionSpec,
    AttentionType,
    EagerAttentionState,
)
from attention.kernels.paged_decode import DecodeRows, PagedDecode
from attention.sdpa_buffers import CacheViews, LayerRows, Scratch, Staging
from attention.sdpa_plan import GroupPlan, GroupPlanner
from attention.sdpa_run import LayerRunner
from attention.sdpa_write import WritePlan, plan_write

__all__ = [
    "TorchSDPABackend",
    "TorchSDPAImpl",
    "TorchSDPAMetadata",
    "TorchSDPAMetadataBuilder",
    "TorchSDPAState",
]


class TorchSDPAMetadata(AttentionMetadata):
    """The plans of one step, one per group of layers."""

    def __init__(self, batch: AttentionBatch, builder: "TorchSDPAMetadataBuilder") -> None:
        super().__init__(batch)
        self._builder = builder
        self._layer_plans = builder.plan_layers(batch)
        self._profile_plans: list[GroupPlan] | None = None
        self._write_plan = builder.plan_write(batch)
        self._num_padding = batch.num_padding
        builder.upload()

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
        """Return the metadata of the next step of a decode-only batch; this one ends."""
        return self._builder.build(self._batch.advanced(self._builder.spec.block_size))

    @property
    def num_padding(self) -> int:
        """Return the number of tokens behind those of the sequences."""
        return self._num_padding

    @property
    def write_plan(self) -> WritePlan:
        """Return where the keys and values of this step go."""
        return self._write_plan

    def layer_plan(self, layer_index: int) -> GroupPlan:
        """Return what a layer does."""
        return self._layer_plans[layer_index]

    def profile_plan(self, layer_index: int) -> GroupPlan:
        """Return what a layer does without a cache: all queries are fresh prompts."""
        if self._profile_plans is None:
            alone = replace(self._batch, seq_lens=self._batch.query_lens)
            self._profile_plans = self._builder.plan_layers(alone, has_cache=False)
            self._builder.upload()
        return self._profile_plans[layer_index]

    def decode(
        self,
        rows: DecodeRows,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        layer_index: int,
        out: torch.Tensor,
    ) -> None:
        """Let the kernel attend for the decodes of a layer."""
        kernel = self._builder.kernels[layer_index]
        assert kernel is not None
        kernel.run(rows, query, kv_cache, layer_index, out)

    def cache_rows(self, kv_cache: torch.Tensor, layer_index: int) -> LayerRows:
        """Return a layer's cache as rows."""
        return self._builder.views.of(kv_cache)[layer_index]


class TorchSDPAMetadataBuilder(AttentionMetadataBuilder):
    """Plans each step into the same buffers."""

    def __init__(self, spec: AttentionSpec, *, use_kernel: bool = True) -> None:
        """`use_kernel=False` keeps decodes on the way through torch, for comparison."""
        super().__init__(spec)
        self._use_kernel = use_kernel
        self.views = CacheViews(spec)
        self._indices = Staging(torch.int64, spec.device)
        self._masks = {dtype: Staging(dtype, spec.device) for dtype in (torch.float32, torch.bool)}
        scratch = Scratch(spec.dtype, spec.device)
        kernels = {
            params: PagedDecode.make(params, spec) if use_kernel else None
            for params in dict.fromkeys(spec.layers)
        }
        self._planners = [
            GroupPlanner(
                params,
                spec=spec,
                indices=self._indices,
                masks=self._masks,
                scratch=scratch,
                has_kernel=kernel is not None,
            )
            for params, kernel in kernels.items()
        ]
        self.kernels = [kernels[params] for params in spec.layers]
        """The decode kernel of each layer, where there is one."""
        groups = {params: i for i, params in enumerate(dict.fromkeys(spec.layers))}
        self._group_of_layer = [groups[params] for params in spec.layers]

    def build(self, batch: AttentionBatch) -> TorchSDPAMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        self._indices.reset()
        for masks in self._masks.values():
            masks.reset()
        return TorchSDPAMetadata(batch, self)

    def alike(self) -> "TorchSDPAMetadataBuilder":
        """Return another builder that plans in the same way, with buffers of its own."""
        return TorchSDPAMetadataBuilder(self._spec, use_kernel=self._use_kernel)

    def plan_layers(self, batch: AttentionBatch, *, has_cache: bool = True) -> list[GroupPlan]:
        """Return the plan of each layer; equal layers have the same one."""
        query_starts = np.cumsum(batch.query_lens, dtype=np.int64) - batch.query_lens
        plans = [
            planner.plan(batch, query_starts, has_cache=has_cache) for planner in self._planners
        ]
        return [plans[group] for group in self._group_of_layer]

    def plan_write(self, batch: AttentionBatch) -> WritePlan:
        """Return where the keys and values of a step go."""
        return plan_write(
            batch,
            block_size=self._spec.block_size,
            num_layers=len(self._spec.layers),
            indices=self._indices,
        )

    def upload(self) -> None:
        """Bring what was planned to the device."""
        self._indices.upload()
        for masks in self._masks.values():
            masks.upload()


class TorchSDPAState(EagerAttentionState):
    """Nothing: a step's shapes follow the lengths of its sequences, so it is not captured."""


class TorchSDPAImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(self, params: AttentionParams, layer_index: int) -> None:
        super().__init__(params, layer_index)
        self._runner = LayerRunner(params)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, then attend."""
        assert isinstance(metadata, TorchSDPAMetadata)
        assert key is not None
        assert value is not None
        if out is None:
            out = query.new_empty(query.shape)
        blocks = kv_cache
        if kv_cache.numel():
            rows = metadata.cache_rows(kv_cache, self._layer_index)
            metadata.write_plan.run(key, value, rows)
            blocks = rows.blocks
            plan = metadata.layer_plan(self._layer_index)
        else:
            plan = metadata.profile_plan(self._layer_index)
        for prompts in plan.prompts:
            self._runner.run_prompts(prompts, query, key, value, out)
        for span in plan.spans:
            self._runner.run_span(span, query, key, value, blocks, out)
        if plan.decodes is not None:
            metadata.decode(plan.decodes, query, kv_cache, self._layer_index, out)
        if plan.chunks:
            self._runner.run_chunks(plan.chunks, query, blocks, out)
        if metadata.num_padding:
            out[-metadata.num_padding :].zero_()
        return out


class TorchSDPABackend(AttentionBackend):
    """Decoder attention with torch alone, on CPUs and GPUs."""

    @staticmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""
        return "torch_sdpa"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAImpl]:
        """Return the class of a layer's computation."""
        return TorchSDPAImpl

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
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        if spec.device.type not in ("cpu", "cuda"):
            yield f"device is {spec.device.type}, but must be cpu or cuda"
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            yield f"dtype is {spec.dtype}, but must be bfloat16, float16 or float32"
        if spec.dtype == torch.float16 and spec.device.type == "cpu":
            yield (
                "dtype is torch.float16, which CPUs compute some hundred times slower than "
                "bfloat16; use bfloat16 or float32"
            )
        own_dtype = str(spec.dtype).removeprefix("torch.")
        for params in dict.fromkeys(spec.layers):
            if params.kv_cache_dtype not in ("auto", own_dtype):
                yield (
                    f"kv_cache_dtype is {params.kv_cache_dtype}, but must be auto or {own_dtype}, "
                    "the dtype of the model"
                )
            if params.attention_type is not AttentionType.DECODER:
                yield f"attention type is {params.attention_type}, but must be decoder"
