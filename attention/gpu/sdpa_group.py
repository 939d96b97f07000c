"""What the torch_sdpa backend runs on a GPU: torch for even batches of prompts, else our kernels.

`scaled_dot_product_attention` reads no blocks, and without a mask it has one length for all.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.gpu.batch import GpuBatch, Rows
from attention.gpu.group import GpuGroup, LayerCache
from attention.gpu.shared_group import SharedGroup
from attention.params import AttentionParams, AttentionSpec

__all__ = ["TorchSDPAGpuGroup"]

_LARGEST_HEAD = 256
_HEAD_STEP = 8


class TorchSDPAGpuGroup(GpuGroup):
    """Fresh sequences of equal length go to torch, all else is shared."""

    def __init__(self, params: AttentionParams, spec: AttentionSpec, *, is_graph: bool) -> None:
        super().__init__(params, spec, is_graph=is_graph)
        self._shared = SharedGroup(params, spec, is_graph=is_graph)
        self._uses_torch = _serves(params, spec)

    @property
    def providers(self) -> dict[str, str]:
        """Return who computes each part of a step."""
        ragged = "torch" if self._uses_torch else "shared"
        return {"prefill": "shared", "prefill_ragged": ragged, "decode": "shared"}

    def plan(self, batch: GpuBatch) -> None:
        """Plan a step; the one before ends. Waits for nothing that the device does."""
        self._shared.plan(batch)

    def prefill(
        self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend for queries of several tokens over cached keys."""
        self._shared.prefill(rows, query, cache, out)

    def prefill_ragged(
        self,
        rows: Rows,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend for sequences whose keys are those of their own tokens."""
        length = rows.max_query_len
        is_even = length * len(rows.query_lens) == rows.num_tokens
        is_cut = self.params.sliding_window is not None and length > self.params.sliding_window
        if not self._uses_torch or not is_even or is_cut:
            self._shared.prefill_ragged(rows, query, key, value, out)
            return
        query, key, value = (
            t.unflatten(0, (-1, length)).transpose(1, 2) for t in (query, key, value)
        )
        result = scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=self.params.is_causal,
            scale=self.params.scale,
            enable_gqa=self.params.num_queries_per_kv > 1,
        )
        out.copy_(result.transpose(1, 2).flatten(0, 1))

    def decode(self, rows: Rows, query: torch.Tensor, cache: LayerCache, out: torch.Tensor) -> None:
        """Attend for one query token of each sequence over cached keys."""
        self._shared.decode(rows, query, cache, out)


def _serves(params: AttentionParams, spec: AttentionSpec) -> bool:
    """Return whether torch has a kernel for these layers that holds no score of all pairs."""
    has_bias = params.soft_cap is not None or params.alibi_slopes is not None
    # Heads that share keys are for kernels of 16 bits only.
    has_kernel = spec.dtype != torch.float32 or params.num_queries_per_kv == 1
    fits = params.head_size <= _LARGEST_HEAD and params.head_size % _HEAD_STEP == 0
    return has_kernel and fits and not has_bias
