"""Metadata of the backends that run on a GPU: what is common to all of them."""

from abc import abstractmethod
from collections import Counter, defaultdict
from functools import cached_property
from typing import ClassVar

import torch

from attention.abstract import (
    AttentionBatch,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from attention.gpu.batch import GpuBatch, GpuBatchUploader, Rows
from attention.gpu.group import GpuGroup, LayerCache
from attention.gpu.unified_op import handle_of

__all__ = ["GpuMetadata", "GpuMetadataBuilder"]


class GpuMetadata(AttentionMetadata):
    """One step. It is uploaded and planned when it is first needed, or never."""

    def __init__(self, batch: AttentionBatch, builder: "GpuMetadataBuilder") -> None:
        super().__init__(builder.padded(batch))
        # Without what pads it for a graph: padding has no next step.
        self._given = batch
        self._builder = builder
        self._gpu_batch: GpuBatch | None = None
        self._step_before: GpuBatch | None = None

    @cached_property
    def handle(self) -> int:
        """Return the number by which the op knows this."""
        return handle_of(self)

    @property
    def prefill_metadata(self) -> "GpuMetadata | None":
        """Return metadata of the prefills alone, with buffers of its own."""
        if not self.num_prefills:
            return None
        return self._builder.alike().build(self._batch.prefills())

    @property
    def decode_metadata(self) -> "GpuMetadata | None":
        """Return metadata of the decodes and the padding, with buffers of its own."""
        if not self.num_decode_tokens:
            return None
        return self._builder.alike().build(self._batch.decodes())

    def advance_step(self) -> "GpuMetadata":
        """Return the metadata of the next step of a decode-only batch; this one ends."""
        following = self._builder.build(self._given.advanced(self._builder.spec.block_size))
        following._step_before = self._gpu_batch
        return following

    @property
    def gpu_batch(self) -> GpuBatch:
        """Return the step's numbers on the GPU, planned for by every group of layers."""
        if self._gpu_batch is None:
            self._gpu_batch = self._builder.plan(self._batch, after=self._step_before)
            self._step_before = None
        return self._gpu_batch

    def run_layer(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write a layer's keys and values to the cache, and attend."""
        batch = self.gpu_batch
        params, group = self._builder.layer(layer_index)
        heads = (-1, params.num_heads, params.head_size)
        kv_heads = (-1, params.num_kv_heads, params.head_size)
        query, out = query.view(heads), out.view(heads)
        cache = None
        if params.is_cached and kv_cache.numel():
            cache = self._builder.layer_cache(layer_index, kv_cache)
        if key is not None and value is not None:
            if cache is not None:
                self._write(params, batch, key, value, cache)
            key, value = key.view(kv_heads), value.view(kv_heads)
        if cache is not None:
            self._attend_cached(params, group, batch, query, key, value, cache, out)
        else:
            assert key is not None
            assert value is not None
            self._attend_ragged(params, group, batch, query, key, value, out)
        if batch.num_padding and params.attention_type is not AttentionType.ENCODER:
            out[-batch.num_padding :].zero_()

    def _write(
        self,
        params: AttentionParams,
        batch: GpuBatch,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
    ) -> None:
        # Imported where it is used: a backend can be asked for its refusals without Triton.
        from attention.kernels.triton.cache_write import cache_write

        slots = batch.slots_of(params.attention_type)
        cache_write(key, value, cache.blocks, slots, k_scale=cache.k_scale, v_scale=cache.v_scale)

    def _attend_cached(
        self,
        params: AttentionParams,
        group: GpuGroup,
        batch: GpuBatch,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        prefills, decodes = batch.rows_of(params.attention_type)
        if prefills is not None:
            tokens = prefills.tokens
            # What an fp8 cache gives back is not what was put in: chunks must not differ by it.
            if prefills.has_no_context and not is_cross and cache.blocks.dtype == query.dtype:
                assert key is not None
                assert value is not None
                group.prefill_ragged(
                    prefills, query[tokens], key[tokens], value[tokens], out[tokens]
                )
            else:
                group.prefill(prefills, query[tokens], cache, out[tokens])
        if decodes is not None:
            group.decode(decodes, query[decodes.tokens], cache, out[decodes.tokens])

    def _attend_ragged(
        self,
        params: AttentionParams,
        group: GpuGroup,
        batch: GpuBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        parts: tuple[Rows | None, ...] = (batch.prefills, batch.decodes)
        if params.attention_type is AttentionType.ENCODER:
            parts = (batch.encoders,)
        for rows in parts:
            if rows is not None:
                tokens = rows.tokens
                group.prefill_ragged(rows, query[tokens], key[tokens], value[tokens], out[tokens])


class GpuMetadataBuilder(AttentionMetadataBuilder):
    """Builds metadata for one backend; a captured graph has a builder of its own."""

    metadata_cls: ClassVar[type[GpuMetadata]] = GpuMetadata

    def __init__(self, spec: AttentionSpec, *, graph_batch_size: int | None = None) -> None:
        """`graph_batch_size`: every batch is padded to so many decodes, and keeps its address."""
        super().__init__(spec)
        self._graph_batch_size = graph_batch_size
        is_graph = graph_batch_size is not None
        if is_graph and spec.max_seq_len is None:
            raise ValueError("max_seq_len is None, but graphs need the longest sequence.")
        self._uploader = GpuBatchUploader(
            spec.device, max_seq_len=spec.max_seq_len if is_graph else None
        )
        groups = {
            params: self._make_group(params, is_graph=is_graph)
            for params in dict.fromkeys(layer.plan_key for layer in spec.layers)
        }
        self._groups = list(groups.values())
        self._layers = [(params, groups[params.plan_key]) for params in spec.layers]
        self._places = spec.cache_layers

    @abstractmethod
    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        """Return what plans for the layers with these parameters."""

    @property
    def groups(self) -> list[GpuGroup]:
        """Return the groups of layers with equal parameters."""
        return self._groups

    def build(self, batch: AttentionBatch) -> GpuMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        return self.metadata_cls(batch, self)

    def alike(self) -> "GpuMetadataBuilder":
        """Return another builder that plans in the same way, with buffers of its own."""
        return type(self)(self._spec)

    def padded(self, batch: AttentionBatch) -> AttentionBatch:
        """Return a batch of the graph's size, or as it is if this builder is of no graph."""
        if self._graph_batch_size is None:
            return batch
        assert self._spec.max_seq_len is not None
        longest = int(batch.seq_lens.max(initial=0))
        if longest > self._spec.max_seq_len:
            raise ValueError(
                f"A sequence of {longest} tokens does not fit a graph for {self._spec.max_seq_len}."
            )
        width = -(-self._spec.max_seq_len // self._spec.block_size)
        return batch.padded(self._graph_batch_size, width)

    def plan(self, batch: AttentionBatch, *, after: GpuBatch | None) -> GpuBatch:
        """Bring a step to the device and plan it for every group.

        `after` is the step before, if this one is that with each sequence one token further.
        """
        if after is None:
            gpu_batch = self._uploader.upload(batch)
        else:
            gpu_batch = self._uploader.advance(batch, after=after, block_size=self._spec.block_size)
        for group in self._groups:
            group.plan(gpu_batch)
        return gpu_batch

    def providers(self) -> dict[str, dict[str, int]]:
        """Return how many layers each provider of kernels serves, by part of a step."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for _, group in self._layers:
            for part, provider in group.providers.items():
                counts[part][provider] += 1
        return {part: dict(providers) for part, providers in counts.items()}

    def provider_sentences(self) -> list[str]:
        """Return a sentence for each provider of some layers, with why it is not the library."""
        sentences = []
        for group in self._groups:
            layers = [i for i, (_, other) in enumerate(self._layers) if other is group]
            lacks = self._lacks(group.params)
            parts: dict[tuple[str, str | None], list[str]] = defaultdict(list)
            for part, provider in group.providers.items():
                # Without a cache every prefill is ragged.
                if group.params.is_cached or part == "prefill_ragged":
                    parts[provider, lacks.get(part)].append(part)
            for (provider, reason), names in parts.items():
                because = "" if reason is None else f": {reason}"
                sentences.append(
                    f"{provider} serves {', '.join(names)} of layers {layers}{because}."
                )
        return sentences

    def _lacks(self, params: AttentionParams) -> dict[str, str]:
        """Return why the shared kernels serve layers with these parameters, by part of a step."""
        return {}

    def layer(self, layer_index: int) -> tuple[AttentionParams, GpuGroup]:
        """Return a layer's parameters and its group."""
        return self._layers[layer_index]

    def layer_cache(self, layer_index: int, kv_cache: torch.Tensor) -> LayerCache:
        """Return a layer's part of the cache of all layers."""
        place = self._places[layer_index]
        assert place is not None
        if kv_cache.dtype != self._spec.cache_dtype:
            kv_cache = kv_cache.view(self._spec.cache_dtype)
        params = self._spec.layers[layer_index]
        return LayerCache(kv_cache[:, place], kv_cache, place, params.k_scale, params.v_scale)
