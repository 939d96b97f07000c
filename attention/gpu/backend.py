"""The base class of all backends on a GPU; a subclass declares only how it differs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from attention.abstract import (
    AttentionBackend,
    AttentionBatch,
    AttentionImpl,
    AttentionInputs,
    AttentionMetadata,
    AttentionSpec,
    AttentionState,
    AttentionType,
    EncoderBatch,
)
from attention.cache import check_pairs, runs_of
from attention.cache import copy_blocks as copy_runs
from attention.gpu.decode_schedule import DecodeMemory
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["GpuBackend"]


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `src` to block `dst` within a cache, all layers, for each pair, all at once.

    The result equals that of `attention.cache.copy_blocks`. Scattered blocks take one kernel
    launch; adjacent blocks take one copy without a kernel.
    """
    if not _can_use_kernel(cache, pairs):
        copy_runs(cache, pairs)
        return
    # Imported here so that this module can be imported without Triton.
    from attention.kernels.triton import copy_blocks as kernel

    check_pairs(pairs, len(cache), len(cache))
    # Torch does not reuse pinned memory before the copies from it are done.
    host = torch.tensor(pairs, dtype=torch.int64)
    if cache.is_cuda:
        host = host.pin_memory()
    kernel.copy_blocks(cache, host.to(cache.device, non_blocking=True))


def _can_use_kernel(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether the kernel, which copies in any order, is correct for them and faster."""
    sources, destinations = zip(*pairs, strict=True) if pairs else ((), ())
    is_apart = len(runs_of(pairs)) > 1
    return is_apart and set(sources).isdisjoint(destinations) and cache.is_contiguous()


class GpuBackend(AttentionBackend):
    """A backend that combines the kernels of a library with the shared kernels."""

    supports_graph_capture = True

    name: ClassVar[str]
    builder_cls: ClassVar[type[GpuMetadataBuilder]]
    packages: ClassVar[dict[str, str]] = {"triton": "triton"}
    """Required packages, by the module to import."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    oldest_capability: ClassVar[tuple[int, int] | None] = None
    """Compute capability that the GPU must have; None for any."""

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[GpuImpl]:
        return GpuImpl

    @classmethod
    def get_metadata_cls(cls) -> type[GpuMetadata]:
        return GpuMetadata

    @classmethod
    def get_state_cls(cls) -> type[GpuState]:
        return state_class(cls.builder_cls)

    @classmethod
    def get_builder_cls(cls) -> type[GpuMetadataBuilder]:
        return cls.builder_cls

    copy_blocks = staticmethod(copy_blocks)

    @classmethod
    def _problems(cls, spec: AttentionSpec) -> Iterator[str]:
        for module, package in cls.packages.items():
            if find_spec(module) is None:
                yield f"the package {package} is not installed"
        yield from cls._problems_of_device(spec.device)
        if spec.dtype not in cls.dtypes:
            yield f"dtype is {spec.dtype}, but must be {_alternatives(cls.dtypes)}"

    @classmethod
    def _problems_of_device(cls, device: torch.device) -> Iterator[str]:
        oldest = cls.oldest_capability
        if device.type != "cuda":
            yield f"device is {device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "CUDA is not available on this machine"
        elif oldest is not None and (found := torch.cuda.get_device_capability(device)) < oldest:
            yield (
                f"the GPU has compute capability {found[0]}.{found[1]}, but must have "
                f"{oldest[0]}.{oldest[1]} or later"
            )


def _alternatives(dtypes: Sequence[torch.dtype]) -> str:
    """Return "bfloat16, float16 or float32" of these."""
    *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(others)} or {last}"


class GpuState(AttentionState):
    """Keeps a builder for each captured batch size; its buffers are the inputs of the graph."""

    builder_cls: ClassVar[type[GpuMetadataBuilder]]

    def __init__(
        self, spec: AttentionSpec, *, graph_builder: GpuMetadataBuilder | None = None
    ) -> None:
        """`graph_builder` is the builder of the graph that a clone belongs to."""
        super().__init__(spec)
        self._graph_builder = graph_builder
        self._builders: dict[int, GpuMetadataBuilder] | None = None
        self._memory = DecodeMemory(spec.device)

    def _allocate_capture_buffers(self, max_batch_size: int) -> None:
        self._builders = {}

    def _release_capture_buffers(self) -> None:
        self._builders = None

    def graph_capture_get_metadata_for_batch(self, batch_size: int) -> GpuMetadata:
        """Return planned metadata of decodes without keys; within `graph_capture`."""
        if self._builders is None:
            raise RuntimeError("Metadata for a capture is available within graph_capture only.")
        builder = self.builder_cls(self._spec, graph_batch_size=batch_size, memory=self._memory)
        self._builders[batch_size] = builder
        metadata = builder.build(_no_decodes(self._spec))
        self.begin_forward(metadata)
        return metadata

    def graph_clone(self, batch_size: int) -> GpuState:
        if self._builders is None or batch_size not in self._builders:
            raise RuntimeError(
                f"Call graph_capture_get_metadata_for_batch({batch_size}) before graph_clone."
            )
        return type(self)(self._spec, graph_builder=self._builders[batch_size])

    def get_graph_input_buffers(self, metadata: AttentionMetadata) -> dict[str, torch.Tensor]:
        assert isinstance(metadata, GpuMetadata)
        batch = metadata.prepare_step()
        buffers = {}
        for index, group in enumerate(batch.groups):
            suffix = f"_{index}" if index else ""
            assert group.decodes is not None
            assert group.decodes.block_tables is not None
            buffers["slot_mapping" + suffix] = group.slot_mapping
            buffers["seq_lens" + suffix] = group.decodes.seq_lens
            buffers["block_tables" + suffix] = group.decodes.block_tables
        if batch.cross_decodes is not None:
            assert batch.cross_decodes.block_tables is not None
            buffers["cross_seq_lens"] = batch.cross_decodes.seq_lens
            buffers["cross_block_tables"] = batch.cross_decodes.block_tables
        return buffers

    def prepare_graph_input_buffers(
        self, input_buffers: Mapping[str, torch.Tensor], metadata: AttentionMetadata
    ) -> None:
        """Upload live metadata to the input buffers of a graph and plan it, before a replay."""
        if self._graph_builder is None:
            raise RuntimeError(
                "This state does not belong to a graph; call this method on its clone."
            )
        planned = self._graph_builder.build(metadata.batch)
        self.begin_forward(planned)
        for name, live in self.get_graph_input_buffers(planned).items():
            # The graph's builder has filled its own buffers, at the addresses of the capture; only
            # buffers of other owners are left.
            if live.data_ptr() != input_buffers[name].data_ptr():
                input_buffers[name].copy_(live)

    def begin_forward(self, metadata: AttentionMetadata) -> None:
        """Upload and plan a step before an eager forward."""
        assert isinstance(metadata, GpuMetadata)
        metadata.prepare_step()


@cache
def state_class(builder_cls: type[GpuMetadataBuilder]) -> type[GpuState]:
    """Return the class of states with graphs of this builder class."""
    name = builder_cls.__name__.replace("MetadataBuilder", "State")
    return type(name, (GpuState,), {"builder_cls": builder_cls})


def _no_decodes(spec: AttentionSpec) -> AttentionBatch:
    """Return a batch of no sequences, which the builder of a graph pads to its batch size."""
    none = np.zeros(0, dtype=np.int32)
    tables = np.zeros((0, 0), dtype=np.int32)
    slots = np.zeros(0, dtype=np.int64)
    has_encoder = any(
        layer.attention_type is AttentionType.ENCODER_DECODER for layer in spec.layers
    )
    encoder = EncoderBatch(query_lens=none, seq_lens=none, block_tables=tables, slot_mapping=slots)
    group = AttentionBatch(
        num_prefills=0, query_lens=none, seq_lens=none, block_tables=tables, slot_mapping=slots
    )
    return replace(
        group,
        encoder=encoder if has_encoder else None,
        other_groups=(group,) * (len(spec.group_windows) - 1),
    )


class GpuImpl(AttentionImpl):
    """The computation of one layer, which is the same for every backend on a GPU."""

    def _attend(
        self,
        metadata: AttentionMetadata,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(metadata, GpuMetadata)
        query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
        metadata.op(query, key, value, sinks, kv_cache, out, metadata.handle, self._layer_index)
