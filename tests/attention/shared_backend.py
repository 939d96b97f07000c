"""A backend of the shared kernels alone, on any device: the GPU path without a library."""

from collections.abc import Iterator

from attention.abstract import AttentionSpec
from attention.gpu.backend import GpuBackend
from attention.gpu.layer_kernels import LayerSet
from attention.gpu.metadata import GpuMetadataBuilder, define_op
from attention.gpu.shared_kernels import SharedKernels


class _Builder(GpuMetadataBuilder):
    op = define_op("unified_shared_test")

    def _make_kernels(self, layers: LayerSet) -> SharedKernels:
        return SharedKernels(layers)


class SharedBackend(GpuBackend):
    """Attention by the shared kernels, which the selector does not know."""

    name = "shared"
    builder_cls = _Builder

    @classmethod
    def _problems(cls, spec: AttentionSpec) -> Iterator[str]:
        yield from ()
