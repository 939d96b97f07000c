"""Metadata of a step on a GPU, its builder, and the torch op of a layer."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cached_property
from itertools import count
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

import torch

from attention.abstract import (
    AttentionBatch,
    AttentionInputs,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionParams,
    AttentionSpec,
    AttentionType,
)
from attention.cache import layers_of_shape
from attention.gpu.batch import GpuBatch, GpuBatchUploader, SubBatch
from attention.gpu.decode_schedule import DecodeMemory, DecodeScheduler
from attention.gpu.layer_kernels import LayerCache, LayerKernels, LayerSet
from attention.kernels.arguments import NewTokens, Rotary

__all__ = ["GpuMetadata", "GpuMetadataBuilder", "TorchSDPAGpuMetadataBuilder", "define_op"]

AttentionOp = Callable[
    [
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor,
        torch.Tensor,
        int,
        int,
    ],
    None,
]
"""Query, key, value, sinks, cache, out, the metadata's handle, the layer's index."""


class GpuMetadata(AttentionMetadata):
    """One step, which is uploaded and planned when it is first needed."""

    def __init__(self, batch: AttentionBatch, builder: GpuMetadataBuilder) -> None:
        super().__init__(builder.padded(batch))
        # Without the padding of a graph, since padding has no next step.
        self._given = batch
        self._builder = builder
        self._gpu_batch: GpuBatch | None = None
        self._step_before: GpuBatch | None = None

    @property
    def op(self) -> AttentionOp:
        """Return the op that computes a layer."""
        return type(self._builder).op

    @cached_property
    def handle(self) -> int:
        """Return the number that identifies this metadata to the op."""
        return handle_of(self)

    @property
    def prefill_metadata(self) -> GpuMetadata | None:
        """Return metadata of the prefills alone, with buffers of its own."""
        if not self.num_prefills:
            return None
        return self._builder.alike().build(self._batch.prefills())

    @property
    def decode_metadata(self) -> GpuMetadata | None:
        """Return metadata of the decodes and the padding, with buffers of its own."""
        if not self.num_decode_tokens:
            return None
        return self._builder.alike().build(self._batch.decodes())

    def advance_step(self) -> GpuMetadata:
        following = self._builder.build(self._given.advanced(self._builder.spec.block_size))
        following._step_before = self._gpu_batch
        return following

    def prepare_step(self) -> GpuBatch:
        """Return the step's numbers on the GPU, which the first call uploads and plans."""
        if self._gpu_batch is None:
            self._gpu_batch = self._builder.prepare_step(self._batch, after=self._step_before)
            self._step_before = None
        return self._gpu_batch

    def write(
        self, layer_index: int, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        params, kernels = self._builder.layer(layer_index)
        slots = self.prepare_step().of_group(kernels.group).slots_of(params.attention_type)
        self._builder.write_layer(layer_index, key, value, kv_cache, slots)

    def attend(
        self, layer_index: int, inputs: AttentionInputs, kv_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        params, kernels = self._builder.layer(layer_index)
        batch = self.prepare_step().of_group(kernels.group)
        cache = None
        if params.is_cached and kv_cache.numel():
            cache = self._builder.layer_cache(layer_index, kv_cache)
        if cache is None:
            self._attend_ragged(params, kernels, batch, inputs, out)
        elif inputs.rotary is not None:
            self._attend_new(kernels, batch, inputs, inputs.rotary, cache, out)
        else:
            if inputs.key is not None and inputs.value is not None and not inputs.is_cached:
                slots = batch.slots_of(params.attention_type)
                self._builder.write_layer(layer_index, inputs.key, inputs.value, kv_cache, slots)
            self._attend_cached(params, kernels, batch, inputs, cache, out)
        is_padded = batch.num_padding and not inputs.is_cached
        if is_padded and params.attention_type is not AttentionType.ENCODER:
            out[-batch.num_padding :].zero_()

    def rotates_layer(self, layer_index: int) -> bool:
        params, kernels = self._builder.layer(layer_index)
        is_decoder = params.attention_type is AttentionType.DECODER
        # The kernel may write the token of a decode while it reads the tokens of another decode.
        is_alone = not self.num_prefills and not self._batch.has_chains
        return is_decoder and is_alone and kernels.takes_new_tokens

    @property
    def device_slot_mappings(self) -> tuple[torch.Tensor, ...]:
        return tuple(group.slot_mapping for group in self.prepare_step().groups)

    def _attend_new(
        self,
        kernels: LayerKernels,
        batch: GpuBatch,
        inputs: AttentionInputs,
        rotary: Rotary,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """Attend for decodes that the kernel rotates and writes itself."""
        if (decodes := batch.decodes) is None:
            return
        tokens = decodes.tokens
        assert inputs.key is not None
        assert inputs.value is not None
        positions = Rotary(rotary.positions[tokens], rotary.table)
        slots = batch.slot_mapping[tokens]
        new = NewTokens(inputs.key[tokens], inputs.value[tokens], slots, positions)
        kernels.decode(decodes, inputs, cache, out, new)

    def _attend_cached(
        self,
        params: AttentionParams,
        kernels: LayerKernels,
        batch: GpuBatch,
        inputs: AttentionInputs,
        cache: LayerCache,
        out: torch.Tensor,
    ) -> None:
        is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        prefills, decodes = batch.sub_batches_of(params.attention_type)
        if prefills is not None:
            # With an fp8 cache whole prompts read the rounded keys too, as chunks of them do.
            is_wide = cache.blocks.dtype == inputs.query.dtype
            if prefills.has_no_context and not is_cross and is_wide:
                kernels.prefill_ragged(prefills, inputs, out)
            else:
                kernels.prefill(prefills, inputs, cache, out)
        if decodes is not None:
            kernels.decode(decodes, inputs, cache, out)

    def _attend_ragged(
        self,
        params: AttentionParams,
        kernels: LayerKernels,
        batch: GpuBatch,
        inputs: AttentionInputs,
        out: torch.Tensor,
    ) -> None:
        parts: tuple[SubBatch | None, ...] = (batch.prefills, batch.decodes)
        if params.attention_type is AttentionType.ENCODER:
            parts = (batch.encoders,)
        for sub_batch in parts:
            if sub_batch is not None:
                kernels.prefill_ragged(sub_batch, inputs, out)


class GpuMetadataBuilder(AttentionMetadataBuilder):
    """Builds metadata for one backend; a captured graph has a builder of its own."""

    op: ClassVar[AttentionOp]

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        graph_batch_size: int | None = None,
        memory: DecodeMemory | None = None,
    ) -> None:
        """`graph_batch_size`: pad every batch to this many decodes and keep its address.

        Other builders with steps on the same stream share `memory`.
        """
        super().__init__(spec)
        self._graph_batch_size = graph_batch_size
        is_graph = graph_batch_size is not None
        if is_graph and spec.max_seq_len is None:
            raise ValueError("max_seq_len is None, but captured graphs require it.")
        self._table_widths = _table_widths(spec) if is_graph else ()
        self._max_seq_lens = _max_seq_lens(spec) if is_graph else None
        self._uploader = GpuBatchUploader(spec.device, max_seq_lens=self._max_seq_lens)
        memory = memory or DecodeMemory(spec.device)
        keys = [
            (layer.plan_key, group)
            for layer, group in zip(spec.layers, spec.cache_groups, strict=True)
        ]
        schedulers: dict[AttentionParams, DecodeScheduler] = {}
        kernels = {
            (params, group): self._make_kernels(
                LayerSet(
                    params=params,
                    group=group,
                    spec=spec,
                    is_graph=is_graph,
                    memory=memory,
                    schedulers=schedulers,
                )
            )
            for params, group in dict.fromkeys(keys)
        }
        self._kernels = tuple(kernels.values())
        self._layers = [
            (params, kernels[key]) for params, key in zip(spec.layers, keys, strict=True)
        ]
        self._places = spec.cache_layers
        self._kv_cache: torch.Tensor | None = None
        self._layer_caches: dict[int, LayerCache] = {}

    @abstractmethod
    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        """Return the kernels of these layers."""

    @property
    def kernels(self) -> tuple[LayerKernels, ...]:
        """Return the kernels of each set of layers with equal parameters."""
        return self._kernels

    def write_layer(
        self,
        layer_index: int,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.cache_write import cache_write

        cache = self.layer_cache(layer_index, kv_cache)
        cache_write(
            key.flatten(1),
            value.flatten(1),
            cache.blocks,
            slot_mapping,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )

    def build(self, batch: AttentionBatch) -> GpuMetadata:
        return GpuMetadata(batch, self)

    def alike(self) -> GpuMetadataBuilder:
        """Return another builder that plans in the same way, with buffers of its own."""
        return type(self)(self._spec)

    def padded(self, batch: AttentionBatch) -> AttentionBatch:
        """Return a batch padded for the graph, or unchanged if this builder belongs to none."""
        if self._graph_batch_size is None:
            return batch
        assert self._max_seq_lens is not None
        # Groups with the same window have the same lengths.
        limits = {
            id(group.seq_lens): (group.seq_lens, limit)
            for group, limit in zip(batch.groups, self._max_seq_lens, strict=True)
        }
        for seq_lens, limit in limits.values():
            longest = int(seq_lens.max(initial=0))
            if longest > limit:
                raise ValueError(
                    f"A sequence of {longest} tokens does not fit a graph for {limit}."
                )
        return batch.padded(self._graph_batch_size, *self._table_widths)

    def prepare_step(self, batch: AttentionBatch, *, after: GpuBatch | None) -> GpuBatch:
        """Upload a step and plan it for all layers.

        `after` is the previous step if this step advances it by one token, else None.
        """
        if after is None:
            gpu_batch = self._uploader.upload(batch)
        else:
            gpu_batch = self._uploader.advance(batch, after=after, block_size=self._spec.block_size)
        for kernels in self._kernels:
            kernels.plan_step(gpu_batch.of_group(kernels.group))
        if batch.excess is not None:
            self._shorten(gpu_batch, batch.excess)
        return gpu_batch

    @property
    def takes_excess(self) -> bool:
        are_shared = all(kernels.providers["decode"] == "shared" for kernels in self._kernels)
        has_tables = self._spec.layout is not None
        return (
            are_shared
            and not has_tables
            and all(
                params.is_cached and params.sliding_window is None for params in self._spec.layers
            )
        )

    def _shorten(self, gpu_batch: GpuBatch, excess: torch.Tensor) -> None:
        """Subtract the excess from lengths that were uploaded and planned."""
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.advance import shorten, shorten_items

        decodes = gpu_batch.decodes
        assert decodes is not None
        assert decodes.block_tables is not None
        shorten(
            decodes.seq_lens,
            gpu_batch.slot_mapping,
            decodes.block_tables,
            excess,
            block_size=self._spec.block_size,
        )
        for kernels in self._kernels:
            if kernels.items is not None:
                shorten_items(kernels.items.words, excess)

    def providers(self) -> dict[str, dict[str, int]]:
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for _, kernels in self._layers:
            for part, provider in kernels.providers.items():
                counts[part][provider] += 1
        return {part: dict(providers) for part, providers in counts.items()}

    def provider_sentences(self) -> list[str]:
        """Return a sentence for each provider of some layers, with why it is not the library."""
        sentences = []
        # Layers of different groups with equal parameters have equal kernels.
        for kernels in {kernels.params: kernels for kernels in self._kernels}.values():
            layers = [
                i for i, (_, other) in enumerate(self._layers) if other.params == kernels.params
            ]
            reasons = self._reasons_for_shared(kernels.params)
            parts: dict[tuple[str, str | None], list[str]] = defaultdict(list)
            for part, provider in kernels.providers.items():
                # Without a cache every prefill is ragged.
                if kernels.params.is_cached or part == "prefill_ragged":
                    parts[provider, reasons.get(part)].append(part)
            for (provider, reason), names in parts.items():
                sentence = f"{provider} kernels compute {', '.join(names)} of layers {layers}"
                sentences.append(f"{sentence}." if reason is None else f"{sentence}: {reason}.")
        return sentences

    def _reasons_for_shared(self, params: AttentionParams) -> dict[str, str]:
        """Return why the shared kernels compute layers with these parameters, by part of a step."""
        return {}

    def layer(self, layer_index: int) -> tuple[AttentionParams, LayerKernels]:
        """Return a layer's parameters and its kernels."""
        return self._layers[layer_index]

    def layer_cache(self, layer_index: int, kv_cache: torch.Tensor) -> LayerCache:
        """Return a layer's part of the cache of all layers."""
        if self._kv_cache is not kv_cache:
            self._kv_cache = kv_cache
            self._layer_caches.clear()
        cache = self._layer_caches.get(layer_index)
        if cache is None:
            cache = self._layer_caches[layer_index] = self._make_layer_cache(layer_index, kv_cache)
        return cache

    def _make_layer_cache(self, layer_index: int, kv_cache: torch.Tensor) -> LayerCache:
        place = self._places[layer_index]
        assert place is not None
        if kv_cache.dtype != self._spec.cache_dtype:
            kv_cache = kv_cache.view(self._spec.cache_dtype)
        params = self._spec.layers[layer_index]
        layers = layers_of_shape(
            kv_cache,
            block_size=self._spec.block_size,
            num_kv_heads=params.num_kv_heads,
            head_size=params.head_size,
        )
        return LayerCache(layers[:, place], layers, place, params.k_scale, params.v_scale)


def _table_widths(spec: AttentionSpec) -> tuple[int, ...]:
    """Return the most blocks that the block tables of a decode need, of each group."""
    assert spec.max_seq_len is not None
    most = -(-spec.max_seq_len // spec.block_size)
    # The keys that a window covers may begin at the end of a block.
    return tuple(
        most if window is None else min(most, -(-(window - 1) // spec.block_size) + 1)
        for window in spec.group_windows
    )


def _max_seq_lens(spec: AttentionSpec) -> tuple[int, ...]:
    """Return the most keys in the block tables of a decode, of each group."""
    assert spec.max_seq_len is not None
    return tuple(min(spec.max_seq_len, width * spec.block_size) for width in _table_widths(spec))


class OpTarget(Protocol):
    """The object that a handle identifies."""

    def attend(
        self, layer_index: int, inputs: AttentionInputs, kv_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write a layer's keys and values to the cache, and attend."""


_SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor? sinks, Tensor(a!) kv_cache, "
    "Tensor(b!) out, int metadata, int layer_index) -> ()"
)

_library = torch.library.Library("pagedray", "DEF")


# Global because an op can pass a number, but no object.
_alive: WeakValueDictionary[int, OpTarget] = WeakValueDictionary()

_handles = count()


def handle_of(target: OpTarget) -> int:
    """Return a number that identifies an object as long as it lives; call it once for each."""
    handle = next(_handles)
    _alive[handle] = target
    return handle


def define_op(name: str) -> AttentionOp:
    """Return the op `pagedray::name`, newly registered."""
    _library.define(name + _SCHEMA)
    # All devices share one implementation; the schema declares the mutated tensors.
    _library.impl(name, _run, "CUDA")
    _library.impl(name, _run, "CPU")
    # Meta tensors have no data.
    _library.impl(name, lambda *_: None, "Meta")
    op: AttentionOp = getattr(torch.ops.pagedray, name).default
    return op


def _run(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    sinks: torch.Tensor | None,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: int,
    layer_index: int,
) -> None:
    inputs = AttentionInputs(query, key, value, sinks=sinks)
    _alive[metadata].attend(layer_index, inputs, kv_cache, out)


class TorchSDPAGpuMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata for torch and the shared kernels."""

    op = define_op("unified_torch_sdpa")

    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        # Imported here because it needs Triton.
        from attention.gpu.shared_kernels import TorchSDPAKernels

        return TorchSDPAKernels(layers)
