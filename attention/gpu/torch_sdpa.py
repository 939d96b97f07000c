"""The torch_sdpa backend on a GPU: torch and the shared kernels, without another library."""

from attention.gpu.layer_kernels import LayerKernels, LayerSet
from attention.gpu.metadata import GpuMetadataBuilder
from attention.gpu.unified_op import define_op

__all__ = ["TorchSDPAGpuMetadataBuilder"]


class TorchSDPAGpuMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata for torch and the shared kernels."""

    op = define_op("unified_torch_sdpa")

    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        # Imported here because it needs Triton.
        from attention.gpu.shared_kernels import TorchSDPAKernels

        return TorchSDPAKernels(layers)
