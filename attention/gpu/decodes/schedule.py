"""Divides the keys of a step's decodes among programs, so that all end at about the same time.

A program reads keys for a sequence, or reads the keys of a shared prefix once for several
sequences. Long ranges of keys are split, and merged by the program that finishes last. (Splits as
in flash decoding; Dao et al., 2023. Shared prefixes as in Hydragen; Juravsky et al., 2024.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attention.gpu.decodes.kept_prefixes import KeptPrefixes
from attention.gpu.decodes.splits import SplitCosts
from attention.kernels.decode_items import NUM_ITEM_WORDS

if TYPE_CHECKING:
    from attention.gpu.decodes.shared_prefixes import SharedPrefixes

__all__ = ["DecodeDivision"]

_Ints = NDArray[np.int32]

_MIN_SHARED_TILES = 4
"""Minimum length in keys of a shared range; shorter ranges are as fast without sharing."""


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """Ranges of keys before they are split: shared ranges, then a range of each row."""

    shared_rows: NDArray[np.int64]
    """`[num_shared, rows_per_item]`, padded with -1."""
    starts: _Ints
    """First tiles, `[num_units]`."""
    ends: _Ints
    """Ends, excluded, in tiles, `[num_units]`."""
    splits: _Ints
    """Number of items of each, `[num_units]`, at least 1."""
    first_parts: _Ints
    """Number of parts of the same rows in earlier units, `[num_units]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDivision:
    """How decodes of one kind of layer are divided."""

    block_size: int
    tile_keys: int
    """Keys that a program reads at a time."""
    rows_per_item: int
    """Maximum number of rows of a program; 1 if rows cannot share keys."""
    costs: SplitCosts
    window: int | None = None
    """Keys that a query sees, itself included; None for all."""

    def max_items(self, num_rows: int) -> int:
        """Return an upper bound of items, from which the grid of a captured graph follows."""
        return self.costs.max_items(num_rows + self._max_shared(num_rows))

    def max_parts(self, num_rows: int) -> int:
        """Return an upper bound of the parts that are merged."""
        num_extra = self.max_items(num_rows) - num_rows
        if self._max_shared(num_rows):
            return num_rows + self.rows_per_item * num_extra
        return 2 * num_extra

    def kept_prefixes(self) -> KeptPrefixes:
        """Return the finder of shared prefixes, for `items`."""
        min_blocks = -(-_MIN_SHARED_TILES * self.tile_keys // self.block_size)
        return KeptPrefixes(min_blocks=min_blocks, max_rows=self.rows_per_item)

    def items(self, seq_lens: _Ints, block_tables: _Ints, prefixes: KeptPrefixes) -> _Ints:
        """Return the items of sequences of these lengths, `[num_rows]`; 0 is padding.

        `block_tables` is `[num_rows, width]`. The result is `words` of `DecodeItems`. A row of a
        length of 0 has an item too.
        """
        starts, ends = self._tiles(seq_lens)
        if max_shared := self._max_shared(len(seq_lens)):
            # The last key of a row is written by this step, so it is never shared.
            num_blocks = np.minimum((seq_lens - 1) // self.block_size, block_tables.shape[1])
            shared = prefixes.find(block_tables, num_blocks)
            if len(shared.rows):
                return self._items(*self._shared_units(shared, max_shared, ends), seq_lens)
        splits = self.costs.splits(ends - starts, self.max_items(len(ends)))
        no_rows = np.zeros((0, self.rows_per_item), dtype=np.int64)
        units = _Units(no_rows, starts, ends, splits, np.zeros_like(splits))
        return self._items(units, splits, seq_lens)

    def _tiles(self, seq_lens: _Ints) -> tuple[_Ints, _Ints]:
        """Return the first tile and the end, excluded, of each row, `[num_rows]` each."""
        ends = -(-seq_lens // self.tile_keys)
        if self.window is None:
            return np.zeros_like(ends), ends
        return np.maximum(seq_lens - self.window, 0) // self.tile_keys, ends

    def _max_shared(self, num_rows: int) -> int:
        """Return an upper bound of the ranges that rows share."""
        if self.rows_per_item == 1 or self.window is not None or num_rows == 1:
            return 0
        return -(-num_rows // self.rows_per_item)

    def _shared_units(
        self, shared: SharedPrefixes, max_shared: int, ends: _Ints
    ) -> tuple[_Units, _Ints]:
        """Return the units of rows that share prefixes, and the number of parts of each row."""
        # The prefixes that save the most blocks come first, in case there are too many.
        set_rows = shared.rows[:max_shared]
        num_keys = shared.num_blocks[:max_shared] * self.block_size
        set_tiles = (num_keys // self.tile_keys).astype(np.int32)
        is_row = set_rows >= 0
        rows, counts = set_rows[is_row], is_row.sum(axis=1)
        shared_tiles, shared_parts = np.zeros_like(ends), np.zeros_like(ends)
        shared_tiles[rows] = np.repeat(set_tiles, counts)
        starts = np.concatenate((np.zeros_like(set_tiles), shared_tiles))
        splits = self.costs.splits(
            np.concatenate((set_tiles, ends)) - starts, self.max_items(len(ends))
        )
        shared_parts[rows] = np.repeat(splits[: len(set_rows)], counts)
        first_parts = np.concatenate((np.zeros_like(set_tiles), shared_parts))
        ends = np.concatenate((set_tiles, ends))
        units = _Units(set_rows, starts, ends, splits, first_parts)
        return units, shared_parts + splits[len(set_rows) :]

    def _items(self, units: _Units, num_parts: _Ints, seq_lens: _Ints) -> _Ints:
        """Return the items of units, the longest first, since the last to start should be short.

        Items of a prefix stay together, so that the keys are still in the L2 cache for the second
        item. `num_parts` and `seq_lens` are `[num_rows]`.
        """
        tiles = units.ends - units.starts
        if units.splits.max(initial=1) == 1:
            chosen = np.argsort(-tiles, kind="stable")
            starts, ends = units.starts[chosen], units.ends[chosen]
            parts = units.first_parts[chosen]
        else:
            chosen = np.repeat(np.arange(len(tiles)), units.splits)
            ordinals = np.arange(len(chosen)) - np.repeat(
                np.cumsum(units.splits) - units.splits, units.splits
            )
            counts, tiles = units.splits[chosen], tiles[chosen]
            firsts, lasts = ordinals * tiles // counts, (ordinals + 1) * tiles // counts
            order = np.argsort(firsts - lasts, kind="stable")
            chosen = chosen[order]
            starts = units.starts[chosen] + firsts[order]
            ends = units.starts[chosen] + lasts[order]
            parts = units.first_parts[chosen] + ordinals[order]
        merged = np.where(num_parts > 1, num_parts, 0)
        row_words = np.empty((len(seq_lens), NUM_ITEM_WORDS), dtype=np.int32)
        row_words[:, 0] = np.arange(len(seq_lens))
        row_words[:, 1] = seq_lens
        row_words[:, 2] = np.cumsum(merged) - merged
        row_words[:, 3] = num_parts
        num_shared = len(units.shared_rows)
        items = np.zeros((len(chosen), 1 + self.rows_per_item, NUM_ITEM_WORDS), dtype=np.int32)
        items[:, 0, 0] = 1
        items[:, 0, 1], items[:, 0, 2], items[:, 0, 3] = starts, ends, parts
        items[:, 1] = row_words.take(chosen - num_shared, axis=0)
        if num_shared:
            places = np.flatnonzero(chosen < num_shared)
            rows = units.shared_rows[chosen[places]]
            items[places, 0, 0] = (rows >= 0).sum(axis=1)
            items[places, 1:] = row_words.take(rows, axis=0)
        return items.reshape(len(chosen), -1)
