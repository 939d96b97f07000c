"""The attention of one forward pass, as the layers of a decoder call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention.abstract import AttentionInputs, AttentionMetadata
from workers.layers.rope import Rotation

if TYPE_CHECKING:
    from attention.layer import Attention

__all__ = ["CachedAttention", "HeadInputs", "SelectedAttention", "StepAttention"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadInputs:
    """The inputs of a layer whose tokens have queries, keys and values by head."""

    heads: torch.Tensor
    """Queries, then keys, `[num_tokens, num_heads + num_kv_heads, head_size]`; may change."""
    value: torch.Tensor
    """`[num_tokens, num_kv_heads, head_size]`."""
    rotation: Rotation | None
    """Of queries and keys; None if they are rotated."""

    def split(
        self, layer: Attention, *, is_rotated: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries and the keys, rotated or as they are."""
        heads = self.heads
        if is_rotated and self.rotation is not None:
            heads = self.rotation(heads)
        query, key = heads.split((layer.params.num_heads, layer.params.num_kv_heads), dim=1)
        return query, key


class StepAttention(ABC):
    """Computes the attention of every layer in one forward pass."""

    @abstractmethod
    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        """Return the layer's attention, `[num_tokens, num_heads * head_size]`."""


class SelectedAttention(StepAttention):
    """Computes the attention of a layer for some tokens of the step alone."""

    def __init__(self, indices: torch.Tensor) -> None:
        """`indices` are the tokens, `[num_selected]` int64 on their device."""
        self.indices = indices

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        return self.attend_selected(layer, query.index_select(0, self.indices), key, inputs.value)

    @abstractmethod
    def attend_selected(
        self, layer: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return what `attend` does, `[num_selected, num_heads * head_size]`.

        Queries are those of the selected tokens, keys and values those of all tokens, by head.
        """


class CachedAttention(StepAttention):
    """Writes keys and values to the cache, and attends over it.

    With an empty cache it attends over those of the step alone: all sequences are whole prompts.
    """

    def __init__(self, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._kv_cache = kv_cache
        self._metadata = metadata

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        index = layer.layer_index
        rotary = None if inputs.rotation is None else inputs.rotation.rotary
        if not self._kv_cache.numel() or not self._metadata.rotates_layer(index):
            rotary = None
        query, key = inputs.split(layer, is_rotated=rotary is None)
        out = query.new_empty(query.shape)
        given = AttentionInputs(query, key, inputs.value, sinks=layer.sinks, rotary=rotary)
        self._metadata.attend(index, given, self._kv_cache, out)
        return out.flatten(1)
