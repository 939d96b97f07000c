"""The builders of the FlashInfer and hybrid backends, which import the library with the kernels."""

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.flashinfer.pages import PageUploader
from attention.flashinfer.unsupported import reason_for_shared
from attention.gpu.decodes.memory import DecodeMemory
from attention.gpu.layer_kernels import LayerKernels, LayerSet
from attention.gpu.metadata import GpuMetadataBuilder
from attention.gpu.unified_op import define_op

__all__ = ["FlashInferMetadataBuilder", "HybridMetadataBuilder"]


class FlashInferMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata for FlashInfer and the shared kernels."""

    op = define_op("unified_flash_infer")

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        graph_batch_size: int | None = None,
        memory: DecodeMemory | None = None,
    ) -> None:
        # Self attention and cross attention see different blocks.
        self._uploaders = {
            is_cross: PageUploader(
                spec.device, spec.block_size, is_graph=graph_batch_size is not None
            )
            for is_cross in (False, True)
        }
        super().__init__(spec, graph_batch_size=graph_batch_size, memory=memory)

    def _reasons_for_shared(self, params: AttentionParams) -> dict[str, str]:
        reason = reason_for_shared(params)
        parts = "prefill", "prefill_ragged", "decode"
        return {} if reason is None else dict.fromkeys(parts, reason)

    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        # Imported here because the shared kernels need Triton, and the others the library.
        if reason_for_shared(layers.params) is not None:
            from attention.gpu.shared_kernels import SharedKernels

            return SharedKernels(layers)

        is_cross = layers.params.attention_type is AttentionType.ENCODER_DECODER
        return self._make_library_kernels(layers, self._uploaders[is_cross])

    def _make_library_kernels(self, layers: LayerSet, uploader: PageUploader) -> LayerKernels:
        """Return the kernels of layers that the library supports."""
        from attention.flashinfer.layer_kernels import FlashInferKernels

        return FlashInferKernels(layers, uploader)


class HybridMetadataBuilder(FlashInferMetadataBuilder):
    """Builds metadata for FlashInfer's prefills and the shared decodes."""

    op = define_op("unified_hybrid")

    def _reasons_for_shared(self, params: AttentionParams) -> dict[str, str]:
        reasons = super()._reasons_for_shared(params)
        return {"decode": "they read the cache faster than FlashInfer", **reasons}

    def _make_library_kernels(self, layers: LayerSet, uploader: PageUploader) -> LayerKernels:
        # Imported here because it needs Triton and the library.
        from attention.flashinfer.layer_kernels import HybridKernels

        return HybridKernels(layers, uploader)
