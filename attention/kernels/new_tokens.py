"""The new tokens of decodes, which kernels of attention rotate and write to the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NewTokens", "Rotary"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embeddings of some tokens."""

    positions: torch.Tensor
    """`[num_tokens]` int64."""
    table: torch.Tensor
    """`[num_positions, head_size]` float32: cosines, then sines, of each pair.

    Element i of a head is paired with i + head_size / 2.
    """

    def select(self, indices: torch.Tensor) -> Rotary:
        """Return the entries of some tokens, `[num_selected]` int64."""
        return Rotary(self.positions.index_select(0, indices), self.table)

    def split(self, sizes: Sequence[int]) -> list[Rotary]:
        """Split the entries into adjacent groups of tokens, given the sizes of the groups."""
        return [Rotary(positions, self.table) for positions in self.positions.split(sizes)]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a decode, before rotation of their queries and keys and the cache write."""

    key: torch.Tensor
    """`[num_tokens, num_kv_heads, head_size]`; tokens may be strided, and so in `value`."""
    value: torch.Tensor
    slots: torch.Tensor
    """Cache slots, `[num_tokens]` int64; -1 for tokens that are not written."""
    rotary: Rotary

    @property
    def layouts(self) -> tuple[tuple[int, ...], ...]:
        """The strides of keys and values."""
        return self.key.stride(), self.value.stride()
