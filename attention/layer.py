"""The module that a model calls for attention."""

import torch
from torch import nn

from attention.abstract import AttentionBackend, AttentionMetadata, AttentionParams
from attention.checks import TensorCheck

__all__ = ["Attention", "AttentionParams"]


class Attention(nn.Module):
    """One layer's attention and its parameters; it has no weights of its own."""

    def __init__(
        self,
        params: AttentionParams,
        *,
        layer_index: int,
        backend: type[AttentionBackend],
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`sinks` is `[num_heads]` float32, and may be loaded later; only with `has_sinks`."""
        super().__init__()
        self.params = params
        self.layer_index = layer_index
        self.sinks = sinks
        self.impl = backend.get_impl_cls()(params, layer_index, sinks)
        self._check = TensorCheck(params)

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
        """Write keys and values to the cache, then attend; `[num_tokens, num_heads * head_size]`.

        `query` is `[num_tokens, num_heads * head_size]`, `key` and `value` are `[num_tokens,
        num_kv_heads * head_size]`; all may be strided. `kv_cache` is the cache of all
        layers, empty in a profile run. `out`, contiguous, is returned if given. Run it in
        `torch.inference_mode` or `torch.no_grad`. Raises ValueError if a tensor does not match.
        """
        self._check(query, key, value, kv_cache, out, metadata.batch)
        return self.impl.forward(query, key, value, kv_cache, metadata, out=out)

    def extra_repr(self) -> str:
        """Return the parameters."""
        return f"layer_index={self.layer_index}, {self.params}"
