"""The backend that runs FlashInfer's kernels, and the shared ones where it has none.

Can be asked for its refusals on any machine: the library is imported when a builder is made.
"""

import logging
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from attention.abstract import AttentionBackend, AttentionBatch, AttentionParams, AttentionSpec
from attention.flashinfer_kernels import reason_for_shared
from attention.flashinfer_pages import PageUploader
from attention.gpu_group import GpuGroup
from attention.gpu_impl import GpuImpl
from attention.gpu_metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu_state import GpuState
from attention.params import AttentionType
from attention.unified_op import define_op

__all__ = [
    "FlashInferBackend",
    "FlashInferImpl",
    "FlashInferMetadata",
    "FlashInferMetadataBuilder",
    "FlashInferState",
]

logger = logging.getLogger(__name__)

_OLDEST_CAPABILITY = (8, 0)
_LARGEST_HEAD = 256


class FlashInferMetadata(GpuMetadata):
    """One step."""


class FlashInferMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata whose groups are the library's or shared."""

    def __init__(self, spec: AttentionSpec, *, graph_batch_size: int | None = None) -> None:
        """`graph_batch_size`: every batch is padded to so many decodes, and keeps its address."""
        # Self attention sees one set of blocks, and cross attention another.
        self._uploaders = {
            is_cross: PageUploader(
                spec.device, spec.block_size, is_graph=graph_batch_size is not None
            )
            for is_cross in (False, True)
        }
        super().__init__(spec, graph_batch_size=graph_batch_size)

    def build(self, batch: AttentionBatch) -> FlashInferMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        return FlashInferMetadata(batch, self)

    def log_servers(self) -> None:
        """Say which layers the shared kernels serve, and why."""
        layers: dict[AttentionParams, list[int]] = {}
        for index, params in enumerate(self._spec.layers):
            layers.setdefault(params.plan_key, []).append(index)
        for params, indices in layers.items():
            reason = reason_for_shared(params)
            if reason is None:
                logger.info("FlashInfer serves layers %s.", indices)
            else:
                logger.info("The shared kernels serve layers %s: %s.", indices, reason)

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where they are used: one needs Triton, and the other the library.
        if reason_for_shared(params) is not None:
            from attention.shared_group import SharedGroup

            return SharedGroup(params, self._spec, is_graph=is_graph)

        from attention.flashinfer_group import FlashInferGroup

        uploader = self._uploaders[params.attention_type is AttentionType.ENCODER_DECODER]
        return FlashInferGroup(params, self._spec, is_graph=is_graph, uploader=uploader)


class FlashInferState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = FlashInferMetadataBuilder


class FlashInferImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_flash_infer")


class FlashInferBackend(AttentionBackend):
    """Attention by FlashInfer on a GPU."""

    supports_graph_capture = True

    @staticmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""
        return "flashinfer"

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """Return the class of a layer's computation."""
        return FlashInferImpl

    @staticmethod
    def get_metadata_cls() -> type[FlashInferMetadata]:
        """Return the class of a step's metadata."""
        return FlashInferMetadata

    @staticmethod
    def get_state_cls() -> type[FlashInferState]:
        """Return the class of a worker's state."""
        return FlashInferState

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """Return the class that builds metadata."""
        return FlashInferMetadataBuilder

    @classmethod
    def make_metadata_builder(cls, spec: AttentionSpec) -> FlashInferMetadataBuilder:
        """Return a builder, and log who serves which layers; a worker keeps one."""
        builder = FlashInferMetadataBuilder(spec)
        builder.log_servers()
        return builder

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        if find_spec("flashinfer") is None:
            yield "the package flashinfer-python is not installed"
        if find_spec("triton") is None:
            yield "the package triton is not installed"
        if spec.device.type != "cuda":
            yield f"device is {spec.device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "there is no CUDA device"
        elif (capability := torch.cuda.get_device_capability(spec.device)) < _OLDEST_CAPABILITY:
            yield (
                f"the GPU has compute capability {capability[0]}.{capability[1]}, but must have "
                f"{_OLDEST_CAPABILITY[0]}.{_OLDEST_CAPABILITY[1]} or later"
            )
        if spec.dtype not in (torch.bfloat16, torch.float16):
            yield f"dtype is {spec.dtype}, but must be bfloat16 or float16"
        for head_size in sorted({layer.head_size for layer in spec.layers}):
            if head_size > _LARGEST_HEAD:
                yield f"head_size is {head_size}, but must be at most {_LARGEST_HEAD}"
