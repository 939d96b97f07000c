"""The builder of the xFormers backend; imports the library when it makes kernels."""

from attention.abstract import AttentionParams
from attention.gpu.layer_kernels import LayerKernels, LayerSet
from attention.gpu.metadata import GpuMetadataBuilder
from attention.gpu.unified_op import define_op
from attention.xformers.unsupported import unsupported_by_decode, unsupported_by_prefill

__all__ = ["XFormersMetadataBuilder"]


class XFormersMetadataBuilder(GpuMetadataBuilder):
    """Builds metadata for xFormers and the shared kernels."""

    op = define_op("unified_xformers")

    def _reasons_for_shared(self, params: AttentionParams) -> dict[str, str]:
        prefill = unsupported_by_prefill(params)
        decode = unsupported_by_decode(params, self._spec)
        features = {"prefill": prefill, "prefill_ragged": prefill, "decode": decode}
        return {
            part: f"xFormers does not support {feature}"
            for part, feature in features.items()
            if feature is not None
        }

    def _make_kernels(self, layers: LayerSet) -> LayerKernels:
        # Imported here because it needs Triton and the library.
        from attention.xformers.layer_kernels import XFormersKernels

        return XFormersKernels(layers)
