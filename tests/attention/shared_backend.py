"""A backend of the shared kernels alone, on any device: all of the GPU's path but a library."""

from collections.abc import Iterator

from attention.abstract import AttentionSpec
from attention.gpu.backend import GpuBackend
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadataBuilder
from attention.gpu.shared_group import SharedGroup
from attention.gpu.state import GpuState
from attention.gpu.unified_op import define_op
from attention.params import AttentionParams

__all__ = ["SharedBackend"]


class _Builder(GpuMetadataBuilder):
    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> SharedGroup:
        return SharedGroup(params, self._spec, is_graph=is_graph)


class _State(GpuState):
    builder_cls = _Builder


class _Impl(GpuImpl):
    op = define_op("unified_shared_test")


class SharedBackend(GpuBackend):
    """Attention by the shared kernels, which the selector does not know."""

    name = "shared"
    impl_cls = _Impl
    state_cls = _State

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        yield from ()
