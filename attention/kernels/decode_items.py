"""Work items of the programs of a decode, on the device, and their shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["NUM_ITEM_WORDS", "DecodeItems", "DecodeScratch"]

NUM_ITEM_WORDS = 4
"""Words of an item before its rows, and of each of its rows."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeScratch:
    """Memory of the decodes that are launched on one stream, for all of their layers."""

    parts: torch.Tensor
    """float32, of at least `(head_size + 1) * num_heads` elements for each part: the results of all
    parts, `[num_parts, num_heads, head_size]`, then their logarithms of sums."""
    arrivals: torch.Tensor
    """Parts of each row and KV head that are there, int32 of at least `num_rows * num_kv_heads`;
    zero before and after every launch."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeItems:
    """The work of one step: rows, each a sequence, and the items among which it is divided.

    An item is a range of keys that some rows see, all of them in the blocks of the first.
    """

    words: torch.Tensor
    """`[num_items, NUM_ITEM_WORDS * (1 + rows_per_item)]` int32. Of an item: number of rows, 0 for
    an item without work; first tile of keys; tile behind the last; which part of each row's result
    this is. Of each of its rows: the row; number of keys; first part in the scratch memory; number
    of parts. The item of a row of one part writes the result, and the parts of others are merged.
    """
    max_parts: int
    """Parts for which there is scratch memory."""
    scratch: DecodeScratch
