"""The attention of one forward pass, as the layers of a decoder call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from attention.abstract import AttentionMetadata
    from attention.layer import Attention

__all__ = ["CachedAttention", "StepAttention"]


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
