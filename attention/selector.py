"""GPU backends with their requirements, and the choice of a backend before a library is loaded."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from attention.abstract import AttentionBackend, AttentionParams, AttentionSpec, AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.gpu.backend import GpuBackend
from attention.gpu.flashinfer_pages import PageUploader
from attention.gpu.metadata import GpuMetadataBuilder, TorchSDPAGpuMetadataBuilder, define_op
from attention.gpu.xformers_unsupported import unsupported_by_decode, unsupported_by_prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attention.gpu.decode_schedule import DecodeMemory
    from attention.gpu.layer_kernels import LayerKernels, LayerSet

__all__ = [
    "BACKEND_NAMES",
    "FlashInferBackend",
    "HybridBackend",
    "TorchSDPAGpuBackend",
    "XFormersBackend",
    "select_backend",
]

HEAD_SIZES = (64, 128, 256)


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
        # Self attention, cross attention and each group of layers see different blocks.
        self._uploaders: dict[tuple[bool, int], PageUploader] = defaultdict(
            lambda: PageUploader(
                spec.device, spec.block_size, is_graph=graph_batch_size is not None
            )
        )
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
        return self._make_library_kernels(layers, self._uploaders[is_cross, layers.group])

    def _make_library_kernels(self, layers: LayerSet, uploader: PageUploader) -> LayerKernels:
        """Return the kernels of layers that the library supports."""
        from attention.gpu.flashinfer_kernels import FlashInferKernels

        return FlashInferKernels(layers, uploader)


class HybridMetadataBuilder(FlashInferMetadataBuilder):
    """Builds metadata for FlashInfer's prefills and the shared decodes."""

    op = define_op("unified_hybrid")

    def _reasons_for_shared(self, params: AttentionParams) -> dict[str, str]:
        reasons = super()._reasons_for_shared(params)
        return {"decode": "they read the cache faster than FlashInfer", **reasons}

    def _make_library_kernels(self, layers: LayerSet, uploader: PageUploader) -> LayerKernels:
        # Imported here because it needs Triton and the library.
        from attention.gpu.flashinfer_kernels import HybridKernels

        return HybridKernels(layers, uploader)


def reason_for_shared(params: AttentionParams) -> str | None:
    """Return why the shared kernels must compute these layers, or None if the library can."""
    if params.alibi_slopes is not None:
        # It derives slopes from the number of heads: wrong for some models and for every rank.
        return "FlashInfer does not support ALiBi slopes"
    if params.has_sinks:
        return "FlashInfer's kernels do not support attention sinks"
    if params.head_size not in HEAD_SIZES:
        allowed = ", ".join(map(str, HEAD_SIZES))
        return f"FlashInfer supports head sizes {allowed} and not {params.head_size}"
    if params.sliding_window is not None and not params.is_causal:
        return "FlashInfer does not support a window on both sides"
    return None


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
        from attention.gpu.xformers_kernels import XFormersKernels

        return XFormersKernels(layers)


class FlashInferBackend(GpuBackend):
    """FlashInfer, and the shared kernels for features that FlashInfer does not support."""

    name = "flashinfer"
    builder_cls = FlashInferMetadataBuilder
    packages = {"flashinfer": "flashinfer-python", "triton": "triton"}  # noqa: RUF012
    oldest_capability = (8, 0)


class HybridBackend(FlashInferBackend):
    """FlashInfer for prefills and the shared kernel for decodes, the fastest of each.

    SGLang calls different kernels for prefills and decodes a hybrid attention backend too.
    """

    name = "hybrid"
    builder_cls = HybridMetadataBuilder


class XFormersBackend(GpuBackend):
    """xFormers, and the shared kernels for features that xFormers does not support."""

    name = "xformers"
    builder_cls = XFormersMetadataBuilder
    packages = {"xformers": "xformers", "triton": "triton"}  # noqa: RUF012
    oldest_capability = (8, 0)


class TorchSDPAGpuBackend(GpuBackend):
    """Torch for batches of equal prompts, and the shared kernels for all else."""

    name = "torch_sdpa"
    builder_cls = TorchSDPAGpuMetadataBuilder
    dtypes = (torch.bfloat16, torch.float16, torch.float32)


AUTO = "auto"
# In the order in which "auto" tries them, fastest first.
_ON_GPU: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (HybridBackend, TorchSDPAGpuBackend, FlashInferBackend, XFormersBackend)
}
_ON_CPU: dict[str, type[AttentionBackend]] = {
    **_ON_GPU,
    TorchSDPABackend.get_name(): TorchSDPABackend,
}
BACKEND_NAMES = (AUTO, *_ON_GPU)


def select_backend(name: str, spec: AttentionSpec) -> type[AttentionBackend]:
    """Return the backend of a name, or for "auto" the first that supports the configuration.

    Otherwise raise a ValueError with every reason and the backends that support it.
    """
    backends = _ON_GPU if spec.device.type == "cuda" else _ON_CPU
    if name in backends and not (backend := backends[name]).check(spec):
        return backend
    reasons = {other: "; ".join(backend.check(spec)) for other, backend in backends.items()}
    supported = [other for other, problems in reasons.items() if not problems]
    if name == AUTO and supported:
        return backends[supported[0]]
    if name == AUTO:
        each = " ".join(f"{other}: {problems}." for other, problems in reasons.items())
        raise ValueError(f"No attention backend supports this configuration. {each}")
    problem = f"Unknown attention backend {name!r}."
    if name in reasons:
        problem = (
            f"Attention backend {name!r} does not support this configuration: {reasons[name]}."
        )
    raise ValueError(f"{problem} {_alternatives(supported)}")


def _alternatives(names: Sequence[str]) -> str:
    if not names:
        return "No other backend supports this configuration."
    return f"Backends that support this configuration: {', '.join(names)}."
