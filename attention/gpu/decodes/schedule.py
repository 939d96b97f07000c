"""Divides the keys of a step's decodes among programs, so that all of them end at about one time.

A program reads keys for one sequence, or for several that share a prefix, whose keys are then read
once. Long ranges of keys are split, and merged by the program that finishes last. (Splits as in
flash decoding; Dao et al., 2023. Shared prefixes as in Hydragen; Juravsky et al., 2024.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attention.gpu.decodes.shared_prefixes import find_shared_prefixes
from attention.gpu.decodes.splits import SplitCosts
from attention.kernels.decode_items import NUM_ITEM_WORDS

if TYPE_CHECKING:
    from attention.gpu.decodes.shared_prefixes import SharedPrefix

__all__ = ["DecodeDivision"]

_Ints = NDArray[np.int32]

_MIN_SHARED_TILES = 4
"""Of keys; less is read as fast by each row on its own."""


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """Ranges of keys before they are split: those that rows share, then one of each row."""

    rows: _Ints
    """`[num_units, any]`, -1 behind the last row."""
    starts: _Ints
    """First tiles, `[num_units]`."""
    ends: _Ints
    """Tiles behind the last, `[num_units]`."""
    splits: _Ints
    """Items of each, `[num_units]`, at least 1."""
    first_parts: _Ints
    """Parts of its rows before those of a unit, `[num_units]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeDivision:
    """How decodes of one kind of layer are divided."""

    block_size: int
    tile_keys: int
    """Keys that a program reads at a time."""
    rows_per_item: int
    """Rows that a program attends for at most; 1 if none can share."""
    costs: SplitCosts
    window: int | None = None
    """Keys that a query sees, itself included; None for all."""

    def max_items(self, num_rows: int) -> int:
        """Return an upper bound of items, from which the grid of a captured graph follows."""
        return self.costs.max_items(num_rows + self._max_chunks(num_rows))

    def max_parts(self, num_rows: int) -> int:
        """Return an upper bound of the parts that are merged."""
        num_extra = self.max_items(num_rows) - num_rows
        if self._max_chunks(num_rows):
            return num_rows + self.rows_per_item * num_extra
        return 2 * num_extra

    def items(self, seq_lens: _Ints, block_tables: _Ints) -> _Ints:
        """Return the items of sequences of these lengths, `[num_rows]`; 0 is padding.

        `block_tables` is `[num_rows, width]`. The result is `words` of `DecodeItems`. A row of a
        length of 0 has an item too.
        """
        starts, ends = self._tiles(seq_lens)
        chunks = self._chunks(seq_lens, block_tables)
        if len(chunks):
            units, num_parts = self._shared_units(chunks, ends)
        else:
            splits = self.costs.splits(ends - starts, self.max_items(len(ends)))
            rows = np.arange(len(ends), dtype=np.int32)[:, None]
            units, num_parts = _Units(rows, starts, ends, splits, np.zeros_like(splits)), splits
        return self._items(units, seq_lens, num_parts)

    def _tiles(self, seq_lens: _Ints) -> tuple[_Ints, _Ints]:
        """Return the first tile and the tile behind the last of each row, `[num_rows]` each."""
        ends = -(-seq_lens // self.tile_keys)
        if self.window is None:
            return np.zeros_like(ends), ends
        return np.maximum(seq_lens - self.window, 0) // self.tile_keys, ends

    def _shared_units(self, chunks: _Ints, ends: _Ints) -> tuple[_Units, _Ints]:
        """Return the units of rows of which those of each chunk share tiles, and parts by row."""
        num_chunks, num_rows = len(chunks), len(ends)
        chunk_tiles, chunk_rows = chunks[:, 0], chunks[:, 1:]
        is_row = chunk_rows >= 0
        shared_rows, counts = chunk_rows[is_row], is_row.sum(axis=1)
        shared_tiles, shared_parts = np.zeros_like(ends), np.zeros_like(ends)
        shared_tiles[shared_rows] = np.repeat(chunk_tiles, counts)
        rows = np.full((num_chunks + num_rows, self.rows_per_item), -1, dtype=np.int32)
        rows[:num_chunks] = chunk_rows
        rows[num_chunks:, 0] = np.arange(num_rows)
        starts = np.concatenate((np.zeros_like(chunk_tiles), shared_tiles))
        ends = np.concatenate((chunk_tiles, ends))
        splits = self.costs.splits(ends - starts, self.max_items(num_rows))
        shared_parts[shared_rows] = np.repeat(splits[:num_chunks], counts)
        first_parts = np.concatenate((np.zeros_like(chunk_tiles), shared_parts))
        units = _Units(rows, starts, ends, splits, first_parts)
        return units, shared_parts + splits[num_chunks:]

    def _items(self, units: _Units, seq_lens: _Ints, num_parts: _Ints) -> _Ints:
        """Return the items of units, the longest first, since the last to start should be short.

        Those of one prefix stay together, so that its keys are still in the L2 cache for the
        second one. `num_parts` is `[num_rows]`.
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
        rows = units.rows[chosen]
        merged = np.where(num_parts > 1, num_parts, 0)
        first_parts = np.cumsum(merged) - merged
        shape = len(chosen), 1 + self.rows_per_item, NUM_ITEM_WORDS
        items = np.zeros(shape, dtype=np.int32)
        items[:, 0, 0] = (rows >= 0).sum(axis=1)
        items[:, 0, 1], items[:, 0, 2], items[:, 0, 3] = starts, ends, parts
        places = items[:, 1 : 1 + rows.shape[1]]
        places[..., 0], places[..., 1] = rows, seq_lens[rows]
        places[..., 2], places[..., 3] = first_parts[rows], num_parts[rows]
        return items.reshape(len(chosen), -1)

    def _max_chunks(self, num_rows: int) -> int:
        if self.rows_per_item == 1 or self.window is not None or num_rows == 1:
            return 0
        return -(-num_rows // self.rows_per_item)

    def _chunks(self, seq_lens: _Ints, block_tables: _Ints) -> _Ints:
        """Return tiles that rows share, and these rows, `[num_chunks, 1 + rows_per_item]`.

        Rows are -1 behind the last. What saves most comes first, should there be too many.
        """
        chunks: list[_Ints] = []
        limit = self._max_chunks(len(seq_lens))
        for prefix in self._prefixes(seq_lens, block_tables) if limit else []:
            tiles = prefix.num_blocks * self.block_size // self.tile_keys
            for first in range(0, len(prefix.rows) - 1, self.rows_per_item):
                rows = prefix.rows[first : first + self.rows_per_item]
                chunk = np.full(1 + self.rows_per_item, -1, dtype=np.int32)
                chunk[0] = tiles
                chunk[1 : 1 + len(rows)] = rows
                chunks.append(chunk)
        shape = -1, 1 + self.rows_per_item
        return np.array(chunks[:limit], dtype=np.int32).reshape(shape)

    def _prefixes(self, seq_lens: _Ints, block_tables: _Ints) -> list[SharedPrefix]:
        # The last key of a row is its own: the step writes it.
        num_blocks = np.minimum((seq_lens - 1) // self.block_size, block_tables.shape[1])
        min_blocks = -(-_MIN_SHARED_TILES * self.tile_keys // self.block_size)
        prefixes = find_shared_prefixes(block_tables, num_blocks, min_blocks=min_blocks)
        return sorted(prefixes, key=lambda one: one.num_saved_blocks, reverse=True)
