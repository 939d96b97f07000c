"""The torch_sdpa backend as it is on a GPU: torch and our own kernels, and no library.

`attention.cpu.torch_sdpa` computes the same by torch alone, and is what this is measured
against.
"""

import torch

from attention.abstract import AttentionParams
from attention.gpu.backend import GpuBackend
from attention.gpu.group import GpuGroup
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu.state import GpuState
from attention.gpu.unified_op import define_op

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

    metadata_cls = TorchSDPAGpuMetadata

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where it is used, as it needs Triton.
        from attention.gpu.sdpa_group import TorchSDPAGpuGroup

        return TorchSDPAGpuGroup(params, self._spec, is_graph=is_graph)


class TorchSDPAGpuState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = TorchSDPAGpuMetadataBuilder


class TorchSDPAGpuImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_torch_sdpa")


class TorchSDPAGpuBackend(GpuBackend):
    """Attention by torch and our own kernels on a GPU."""

    name = "torch_sdpa"
    impl_cls = TorchSDPAGpuImpl
    state_cls = TorchSDPAGpuState
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
