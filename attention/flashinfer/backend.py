"""The backend that runs FlashInfer's kernels, and the shared ones where it has none.

Can be asked for its refusals on any machine: the library is imported when a builder is made.
"""

from collections.abc import Iterator

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.flashinfer.kernels import reason_for_shared
from attention.flashinfer.pages import PageUploader
from attention.gpu.backend import GpuBackend
from attention.gpu.group import GpuGroup
from attention.gpu.impl import GpuImpl
from attention.gpu.metadata import GpuMetadata, GpuMetadataBuilder
from attention.gpu.state import GpuState
from attention.gpu.unified_op import define_op

__all__ = [
    "FlashInferBackend",
    "FlashInferImpl",
    "FlashInferMetadata",
    "FlashInferMetadataBuilder",
    "FlashInferState",
]

_LARGEST_HEAD = 256


class FlashInferMetadata(GpuMetadata):
    """One step."""


class FlashInferMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata whose groups are the library's or shared."""

    metadata_cls = FlashInferMetadata

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

    def _lacks(self, params: AttentionParams) -> dict[str, str]:
        reason = reason_for_shared(params)
        return (
            {} if reason is None else dict.fromkeys(("prefill", "prefill_ragged", "decode"), reason)
        )

    def _make_group(self, params: AttentionParams, *, is_graph: bool) -> GpuGroup:
        # Imported where they are used: one needs Triton, and the other the library.
        if reason_for_shared(params) is not None:
            from attention.gpu.shared_group import SharedGroup

            return SharedGroup(params, self._spec, is_graph=is_graph)

        uploader = self._uploaders[params.attention_type is AttentionType.ENCODER_DECODER]
        return self._group_by_library(params, is_graph=is_graph, uploader=uploader)

    def _group_by_library(
        self, params: AttentionParams, *, is_graph: bool, uploader: PageUploader
    ) -> GpuGroup:
        """Return what plans for layers that the library can serve."""
        from attention.flashinfer.group import FlashInferGroup

        return FlashInferGroup(params, self._spec, is_graph=is_graph, uploader=uploader)


class FlashInferState(GpuState):
    """What a worker keeps for captured graphs."""

    builder_cls = FlashInferMetadataBuilder


class FlashInferImpl(GpuImpl):
    """One layer's attention."""

    op = define_op("unified_flash_infer")


class FlashInferBackend(GpuBackend):
    """Attention by FlashInfer on a GPU."""

    name = "flashinfer"
    impl_cls = FlashInferImpl
    state_cls = FlashInferState
    packages = {"flashinfer": "flashinfer-python", "triton": "triton"}  # noqa: RUF012
    oldest_capability = (8, 0)

    @classmethod
    def _refusals(cls, spec: AttentionSpec) -> Iterator[str]:
        yield from super()._refusals(spec)
        for head_size in sorted({layer.head_size for layer in spec.layers}):
            if head_size > _LARGEST_HEAD:
                yield f"head_size is {head_size}, but must be at most {_LARGEST_HEAD}"
