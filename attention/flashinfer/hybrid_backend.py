"""The backend that is fastest as a whole: FlashInfer for prompts, the shared kernel for decodes.

Prefill and decode by different kernels is what SGLang calls a hybrid attention backend too.
"""

from attention.abstract import AttentionParams
from attention.flashinfer.backend import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadata,
    FlashInferMetadataBuilder,
    FlashInferState,
)
from attention.flashinfer.pages import PageUploader
from attention.gpu.group import GpuGroup
from attention.gpu.unified_op import define_op

__all__ = [
    "HybridBackend",
    "HybridImpl",
    "HybridMetadata",
    "HybridMetadataBuilder",
    "HybridState",
]


class HybridMetadata(FlashInferMetadata):
    """One step."""


class HybridMetadataBuilder(FlashInferMetadataBuilder):
    """Builds metadata whose groups have the library for prompts and the shared kernels."""

    metadata_cls = HybridMetadata

    def _lacks(self, params: AttentionParams) -> dict[str, str]:
        return {"decode": "it reads the cache faster than FlashInfer", **super()._lacks(params)}

    def _group_by_library(
        self, params: AttentionParams, *, is_graph: bool, uploader: PageUploader
    ) -> GpuGroup:
        # Imported where it is used, as it needs the library and Triton.
        from attention.flashinfer.hybrid_group import HybridGroup

        return HybridGroup(params, self._spec, is_graph=is_graph, uploader=uploader)


class HybridState(FlashInferState):
    """What a worker keeps for captured graphs."""

    builder_cls = HybridMetadataBuilder


class HybridImpl(FlashInferImpl):
    """One layer's attention."""

    op = define_op("unified_hybrid")


class HybridBackend(FlashInferBackend):
    """Attention by FlashInfer and by our own decodes; serves and refuses what FlashInfer does."""

    name = "hybrid"
    impl_cls = HybridImpl
    state_cls = HybridState
