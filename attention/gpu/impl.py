"""One layer's attention on a GPU: the registered op around what its group runs."""

from typing import ClassVar

import torch

from attention.abstract import AttentionImpl, AttentionMetadata
from attention.gpu.metadata import GpuMetadata
from attention.gpu.unified_op import AttentionOp

__all__ = ["GpuImpl"]


class GpuImpl(AttentionImpl):
    """The same for every backend but for the name of its op."""

    op: ClassVar[AttentionOp]

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
        type(self).op(query, key, value, kv_cache, out, metadata.handle, self._layer_index)
        return out
