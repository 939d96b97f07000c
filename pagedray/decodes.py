"""The decodes of a plan: arrays, so that many take little time to send, receive and apply."""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Decodes"]


class Decodes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sequences of which a step computes the last token and samples the next one.

    Every field has int32 in native byte order.
    """

    rows: bytes = b""
    """`[num_decodes]`."""
    positions: bytes = b""
    """`[num_decodes]`: of the tokens that are computed."""
    growing_rows: bytes = b""
    """`[num_new_blocks]`: those of `rows` whose tokens are the first in their blocks."""
    new_block_ids: bytes = b""
    """`[num_new_blocks]`: appended to the block tables of these rows before the forward pass."""

    @classmethod
    def pack(
        cls,
        rows: Sequence[int],
        positions: Sequence[int],
        growing_rows: Sequence[int] = (),
        new_block_ids: Sequence[int] = (),
    ) -> Decodes:
        """Return decodes of the given rows."""
        return cls(_pack(rows), _pack(positions), _pack(growing_rows), _pack(new_block_ids))

    def __len__(self) -> int:
        return len(self.rows) // 4

    @property
    def num_pairs(self) -> int:
        """Pairs of a token and one that it attends to."""
        return sum(array("i", self.positions)) + len(self)


def _pack(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"{len(numbers)}i", *numbers) if numbers else b""
