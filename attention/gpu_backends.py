"""GPU backends: their kernels and requirements.

No kernel library is imported before a builder is made, so that the selector can ask every backend
on any machine whether it supports a configuration.
"""

import torch

from attention.flashinfer.builder import FlashInferMetadataBuilder, HybridMetadataBuilder
from attention.gpu.backend import GpuBackend
from attention.gpu.torch_sdpa import TorchSDPAGpuMetadataBuilder
from attention.xformers.builder import XFormersMetadataBuilder

__all__ = ["FlashInferBackend", "HybridBackend", "TorchSDPAGpuBackend", "XFormersBackend"]


class FlashInferBackend(GpuBackend):
    """FlashInfer, and the shared kernels for features that FlashInfer does not support."""

    name = "flashinfer"
    builder_cls = FlashInferMetadataBuilder
    packages = {"flashinfer": "flashinfer-python", "triton": "triton"}  # noqa: RUF012
    oldest_capability = (8, 0)
    largest_head_size = 256


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
