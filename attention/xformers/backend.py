"""The backend on xFormers, and on our own kernels for what xFormers lacks.

Neither is imported before a builder is made: whether the backend can be used at all is asked
where they are not installed.
"""

from attention.abstract import AttentionParams
from attention.gpu.backend import GpuBackend
from attention.gpu.group import GpuGroup
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu.state import GpuState
from attention.gpu.unified_op import define_op
from attention.xformers.unsupported import why_decode_is_shared, why_prefill_is_shared

__all__ = [
    "XFormersBackend",
    "XFormersImpl",
    "XFormersMetadata",
    "XFormersMetadataBuilder",
    "XFormersState",
]


class XFormersMetadata(GpuMetadata):
    """One step."""


class XFormersMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata whose groups have xFormers and the shared kernels."""

    metadata_cls = XFormersMetadata

    def _lacks(self, params: AttentionParams) -> dict[str, str]:
        prefill = why_prefill_is_shared(params)
        decode = why_decode_is_shared(params, self._spec)
        reasons = {"prefill": prefill, "prefill_ragged": prefill, "decode": decode}
        return {
            part: f"xFormers lacks {reason}"
            for part, reason in reasons.items()
            if reason is not None
        }

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where it is used, as it needs Triton and the library.
        from attention.xformers.group import XFormersGroup

        return XFormersGroup(params, self._spec, is_graph=is_graph)


class XFormersState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = XFormersMetadataBuilder


class XFormersImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_xformers")


class XFormersBackend(GpuBackend):
    """Attention by xFormers on a GPU."""

    name = "xformers"
    impl_cls = XFormersImpl
    state_cls = XFormersState
    packages = {"xformers": "xformers", "triton": "triton"}  # noqa: RUF012
    oldest_capability = (8, 0)
