"""One layer's attention on a GPU: calls the registered op around its kernels."""

import torch

from attention.abstract import AttentionImpl, AttentionInputs, AttentionMetadata
from attention.gpu.metadata import GpuMetadata

__all__ = ["GpuImpl"]


class GpuImpl(AttentionImpl):
    """The computation of one layer, which is the same for every backend on a GPU."""

    def _attend(
        self,
        metadata: AttentionMetadata,
        inputs: AttentionInputs,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        assert isinstance(metadata, GpuMetadata)
        query, key, value, sinks = inputs.query, inputs.key, inputs.value, inputs.sinks
        metadata.op(query, key, value, sinks, kv_cache, out, metadata.handle, self._layer_index)
