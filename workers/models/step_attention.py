"""The attention of one forward pass, as the layers of a decoder call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attention.abstract import AttentionMetadata
    from attention.layer import Attention
    from workers.layers.rope import Rotation

__all__ = ["CachedAttention", "SelectedAttention", "StepAttention"]


class StepAttention(ABC):
    """Computes the attention of every layer in one forward pass."""

    @abstractmethod
    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the layer's attention, `[num_tokens, num_heads * head_size]`.

        Shapes are those of `Attention.forward`.
        """

    def attend_rotated(
        self, layer: Attention, heads: torch.Tensor, value: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Rotate queries and keys, and return what `attend` does.

        `heads` is `[num_tokens, num_heads + num_kv_heads, head_size]`, queries before keys; it may
        change in place.
        """
        return self.attend_heads(layer, rotation(heads), value)

    def attend_heads(
        self, layer: Attention, heads: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return what `attend` does; `heads` is as in `attend_rotated`, and already rotated."""
        num_heads, num_kv_heads = layer.params.num_heads, layer.params.num_kv_heads
        query, key = heads.split((num_heads, num_kv_heads), dim=1)
        return self.attend(layer, query.flatten(1), key.flatten(1), value)


class SelectedAttention(StepAttention):
    """Computes the attention of a layer for some tokens of the step alone."""

    def __init__(self, indices: torch.Tensor) -> None:
        """`indices` are the tokens, `[num_selected]` int64 on their device."""
        self.indices = indices

    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        return self.attend_selected(layer, query.index_select(0, self.indices), key, value)

    @abstractmethod
    def attend_selected(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return what `attend` does, `[num_selected, num_heads * head_size]`.

        Queries are those of the selected tokens, keys and values those of all tokens.
        """


class CachedAttention(StepAttention):
    """Writes keys and values to the cache, and attends over it.

    With an empty cache it attends over those of the step alone: all sequences are whole prompts.
    """

    def __init__(self, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata

    def attend(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        return layer.forward(query, key, value, self._kv_cache, self._metadata)

    def attend_rotated(
        self, layer: Attention, heads: torch.Tensor, value: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        rotary, index = rotation.rotary, layer.layer_index
        if rotary is None or not self._kv_cache.numel() or not self._metadata.rotates_layer(index):
            return super().attend_rotated(layer, heads, value, rotation)
        num_heads, num_kv_heads = layer.params.num_heads, layer.params.num_kv_heads
        query, key = heads.split((num_heads, num_kv_heads), dim=1)
        out: torch.Tensor = query.new_empty(query.shape)
        self._metadata.attend_unrotated(
            index,
            query,
            key,
            value.unflatten(1, key.shape[1:]),
            rotary,
            self._kv_cache,
            out,
            sinks=layer.sinks,
        )
        return out.flatten(1)
