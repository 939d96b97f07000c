"""State of captured graphs, the same for every GPU backend."""

from collections.abc import Mapping
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from attention.abstract import (
    AttentionBatch,
    AttentionMetadata,
    AttentionSpec,
    AttentionState,
    AttentionType,
    EncoderBatch,
)
from attention.gpu.decodes.memory import DecodeMemory
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder

__all__ = ["GpuState", "state_class"]


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

    def graph_clone(self, batch_size: int) -> "GpuState":
        """Return the state to keep with the graph of this size; within `graph_capture`."""
        if self._builders is None or batch_size not in self._builders:
            raise RuntimeError(
                f"Call graph_capture_get_metadata_for_batch({batch_size}) before graph_clone."
            )
        return type(self)(self._spec, graph_builder=self._builders[batch_size])

    def get_graph_input_buffers(self, metadata: AttentionMetadata) -> dict[str, torch.Tensor]:
        """Return the tensors that the captured graph reads, by name."""
        assert isinstance(metadata, GpuMetadata)
        batch = metadata.prepare_step()
        assert batch.decodes is not None
        assert batch.decodes.block_tables is not None
        buffers = {
            "slot_mapping": batch.slot_mapping,
            "seq_lens": batch.decodes.seq_lens,
            "block_tables": batch.decodes.block_tables,
        }
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
    return AttentionBatch(
        num_prefills=0,
        query_lens=none,
        seq_lens=none,
        block_tables=tables,
        slot_mapping=slots,
        encoder=encoder if has_encoder else None,
    )
