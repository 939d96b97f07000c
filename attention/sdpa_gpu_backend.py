"""The torch_sdpa backend as it is on a GPU: torch and our own kernels, and no library.

`torch_sdpa_backend` computes the same by torch alone, and is what this is measured against.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from attention.abstract import AttentionBackend, AttentionBatch, AttentionParams, AttentionSpec
from attention.gpu_group import GpuGroup
from attention.gpu_impl import GpuImpl
from attention.gpu_metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu_state import GpuState
from attention.unified_op import define_op

__all__ = [
    "TorchSDPAGpuBackend",
    "TorchSDPAGpuImpl",
    "TorchSDPAGpuMetadata",
    "TorchSDPAGpuMetadataBuilder",
    "TorchSDPAGpuState",
]


class TorchSDPAGpuMetadata(GpuMetadata):
    """One step."""


class TorchSDPAGpuMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata whose groups have torch and the shared kernels."""

    def build(self, batch: AttentionBatch) -> TorchSDPAGpuMetadata:
        """Return the metadata of one step; the one built before is no longer valid."""
        return TorchSDPAGpuMetadata(batch, self)

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where it is used, as it needs Triton.
        from attention.sdpa_gpu_group import TorchSDPAGpuGroup

        return TorchSDPAGpuGroup(params, self._spec, is_graph=is_graph)


class TorchSDPAGpuState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = TorchSDPAGpuMetadataBuilder


class TorchSDPAGpuImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_torch_sdpa")


class TorchSDPAGpuBackend(AttentionBackend):
    """Attention by torch and our own kernels on a GPU."""

    supports_graph_capture = True

    @staticmethod
    def get_name() -> str:
        """Return the name by which the selector knows this backend."""
        return "torch_sdpa"

    @staticmethod
    def get_impl_cls() -> type[TorchSDPAGpuImpl]:
        """Return the class of a layer's computation."""
        return TorchSDPAGpuImpl

    @staticmethod
    def get_metadata_cls() -> type[TorchSDPAGpuMetadata]:
        """Return the class of a step's metadata."""
        return TorchSDPAGpuMetadata

    @staticmethod
    def get_state_cls() -> type[TorchSDPAGpuState]:
        """Return the class of a worker's state."""
        return TorchSDPAGpuState

    @staticmethod
    def get_builder_cls() -> type[TorchSDPAGpuMetadataBuilder]:
        """Return the class that builds metadata."""
        return TorchSDPAGpuMetadataBuilder

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        if find_spec("triton") is None:
            yield "the package triton is not installed"
        if spec.device.type != "cuda":
            yield f"device is {spec.device.type}, but must be cuda"
        elif not torch.cuda.is_available():
            yield "there is no CUDA device"
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            yield f"dtype is {spec.dtype}, but must be bfloat16, float16 or float32"
