"""A backend of the shared kernels alone, on any device: the GPU path without a library."""

from collections.abc import Iterator

from attention.abstract import AttentionSpec
from attention.gpu.backend import GpuBackend
from attention.gpu.metadata import GpuMetadataBuilder
from attention.gpu.shared_kernels import SharedKernels
from attention.gpu.unified_op import define_op
from attention.params import AttentionParams

__all__ = ["SharedBackend"]


class _Builder(GpuMetadataBuilder):
    op = define_op("unified_shared_test")

    def _make_kernels(self, params: AttentionParams, *, is_graph: bool) -> SharedKernels:
        return SharedKernels(params, self._spec, is_graph=is_graph, memory=self._memory)


class SharedBackend(GpuBackend):
    """Attention by the shared kernels, which the selector does not know."""

    name = "shared"
    builder_cls = _Builder

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        yield from ()
