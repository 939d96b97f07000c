"""The module that a model calls for attention."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from attention.params import AttentionParams, AttentionType, cache_dtype, storage_dtype

if TYPE_CHECKING:
    from attention.abstract import AttentionBackend, AttentionMetadata
    from attention.batch import AttentionBatch

__all__ = ["Attention"]


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


class TensorCheck:
    """Checks the tensors of a layer; tensors like the previous ones cost a single comparison."""

    def __init__(self, params: AttentionParams) -> None:
        self._params = params
        self._is_encoder = params.attention_type is AttentionType.ENCODER
        self._is_cross = params.attention_type is AttentionType.ENCODER_DECODER
        self._fitting: tuple[object, ...] = ()
        self._fitting_cache: weakref.ref[torch.Tensor] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        out: torch.Tensor | None,
        batch: AttentionBatch,
    ) -> None:
        """Raise ValueError with the given and the allowed shapes, dtypes and devices."""
        encoder = batch.encoder
        num_encoder_tokens = 0 if encoder is None else len(encoder.slot_mapping)
        num_tokens = num_encoder_tokens if self._is_encoder else len(batch.slot_mapping)
        num_keys = num_encoder_tokens if self._is_cross else num_tokens
        looks = (
            num_tokens,
            num_keys,
            query.shape,
            query.dtype,
            query.get_device(),
            query.stride(),
            None if key is None else _look(key),
            None if value is None else _look(value),
            None if out is None else _look(out),
        )
        is_known = self._fitting_cache is not None and self._fitting_cache() is kv_cache
        if is_known and looks == self._fitting:
            return
        self._check_rows("query", query, num_tokens, self._params.num_heads, query)
        self._check_keys(query, key, value, num_keys)
        self._check_cache(query, kv_cache)
        if out is not None:
            self._check_rows("out", out, num_tokens, self._params.num_heads, query)
            if not out.is_contiguous():
                raise ValueError(f"out has strides {out.stride()}, but must be contiguous.")
        self._fitting, self._fitting_cache = looks, weakref.ref(kv_cache)

    def _check_keys(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        num_keys: int,
    ) -> None:
        for name, tensor in (("key", key), ("value", value)):
            if tensor is not None:
                self._check_rows(name, tensor, num_keys, self._params.num_kv_heads, query)
        if (key is None) != (value is None):
            raise ValueError(
                f"key is {_words(key)}, but value is {_words(value)}: pass both or neither."
            )
        if key is None and (num_keys or not self._is_cross):
            raise ValueError(
                f"key is None, but {self._params.attention_type} attention requires it for "
                f"{num_keys} computed keys."
            )

    def _check_rows(
        self, name: str, tensor: torch.Tensor, num_rows: int, num_heads: int, query: torch.Tensor
    ) -> None:
        shape = (num_rows, num_heads * self._params.head_size)
        if tensor.shape != shape or tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} is {_words(tensor)}, but must be {shape} {query.dtype} on {query.device}."
            )
        if tensor.numel() and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}, but its last dimension must be contiguous."
            )

    def _check_cache(self, query: torch.Tensor, kv_cache: torch.Tensor) -> None:
        if not kv_cache.numel() or not self._params.is_cached:
            return
        dtype = storage_dtype(cache_dtype(self._params.kv_cache_dtype, query.dtype))
        heads = (self._params.num_kv_heads, self._params.head_size)
        # A cache of layers of several shapes has two dimensions.
        is_shaped = kv_cache.dim() == 2 or (
            kv_cache.dim() == 6 and kv_cache.shape[2] == 2 and kv_cache.shape[4:] == heads
        )
        if not is_shaped or kv_cache.dtype != dtype or kv_cache.device != query.device:
            raise ValueError(
                f"kv_cache is {_words(kv_cache)}, but must be (num_blocks, num_layers, 2, "
                f"block_size, {heads[0]}, {heads[1]}) {dtype} on {query.device}."
            )


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the properties of a tensor that must stay the same from call to call."""
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.stride()


def _words(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
