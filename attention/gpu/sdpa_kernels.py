"""Kernels of the torch_sdpa backend on a GPU: torch for prompts of equal length, else shared.

`scaled_dot_product_attention` cannot read blocks, and without a mask it takes one length for all.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.gpu.batch import SubBatch
from attention.gpu.layer_kernels import LayerSet
from attention.gpu.shared_kernels import SharedKernels
from attention.params import AttentionParams, AttentionSpec

__all__ = ["TorchSDPAKernels"]

_LARGEST_HEAD = 256
_HEAD_STEP = 8


class TorchSDPAKernels(SharedKernels):
    """Sequences of equal length and without context by torch, all else by the shared kernels."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__(layers)
        self._uses_torch = _supports(layers.params, layers.spec)

    @property
    def providers(self) -> dict[str, str]:
        ragged = "torch" if self._uses_torch else "shared"
        return {"prefill": "shared", "prefill_ragged": ragged, "decode": "shared"}

    def prefill_ragged(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None,
    ) -> None:
        length = sub_batch.max_query_len
        are_equal = length * len(sub_batch.query_lens) == sub_batch.num_tokens
        is_cut = self.params.sliding_window is not None and length > self.params.sliding_window
        if not self._uses_torch or not are_equal or is_cut:
            super().prefill_ragged(sub_batch, query, key, value, out, sinks=sinks)
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


def _supports(params: AttentionParams, spec: AttentionSpec) -> bool:
    """Return whether torch has a kernel for these layers that does not store all scores."""
    has_bias = not params.has_plain_softmax or params.alibi_slopes is not None
    # Only kernels for 16 bits support query heads that share a KV head.
    has_kernel = spec.dtype != torch.float32 or params.num_queries_per_kv == 1
    fits = params.head_size <= _LARGEST_HEAD and params.head_size % _HEAD_STEP == 0
    return has_kernel and fits and not has_bias
