"""One layer's attention on a GPU: calls the registered op around its kernels."""

import torch

from attention.abstract import AttentionImpl, AttentionMetadata
from attention.gpu.metadata import GpuMetadata

__all__ = ["GpuImpl"]


class GpuImpl(AttentionImpl):
    """The computation of one layer, which is the same for every backend on a GPU."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, then attend."""
        assert isinstance(metadata, GpuMetadata)
        if out is None:
            out = query.new_empty(query.shape)
        metadata.op(
            query, key, value, self._sinks, kv_cache, out, metadata.handle, self._layer_index
        )
        return out
