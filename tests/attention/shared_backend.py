"""A backend of the shared kernels alone, on any device: all of the GPU's path but a library."""

from collections.abc import Iterable

from attention.abstract import AttentionBackend, AttentionSpec
from attention.gpu_impl import GpuImpl
from attention.gpu_metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu_state import GpuState
from attention.params import AttentionParams
from attention.shared_group import SharedGroup
from attention.unified_op import define_op

__all__ = ["SharedBackend"]


class _Builder(GpuMetadataBuilder):
    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> SharedGroup:
        return SharedGroup(params, self._spec, is_graph=is_graph)


class _State(GpuState):
    builder_cls = _Builder


class _Impl(GpuImpl):
    op = define_op("unified_shared_test")


class SharedBackend(AttentionBackend):
    """Attention by the shared kernels."""

    supports_graph_capture = True

    @staticmethod
    def get_name() -> str:
        """Return a name that the selector does not know."""
        return "shared"

    @staticmethod
    def get_impl_cls() -> type[GpuImpl]:
        """Return the class of a layer's computation."""
        return _Impl

    @staticmethod
    def get_metadata_cls() -> type[GpuMetadata]:
        """Return the class of a step's metadata."""
        return GpuMetadata

    @staticmethod
    def get_state_cls() -> type[GpuState]:
        """Return the class of a worker's state."""
        return _State

    @staticmethod
    def get_builder_cls() -> type[GpuMetadataBuilder]:
        """Return the class that builds metadata."""
        return _Builder

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterable[str]:
        return ()
