"""Divides the keys of a step's decodes among programs, so that all end at about the same time.

A program reads keys for a sequence, or reads the keys of a shared prefix once for several
sequences. Long ranges of keys are split, and merged by the program that finishes last. (Splits as
in flash decoding; Dao et al., 2023. Shared prefixes as in Hydragen; Juravsky et al., 2024.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from attention.gpu.batch import PinnedRing, copy_from_host
from attention.kernels.arguments import NUM_ITEM_WORDS, DecodeItems, DecodeScratch

if TYPE_CHECKING:
    from attention.params import AttentionParams

__all__ = [
    "CachedPrefixes",
    "DecodeDivision",
    "DecodeMemory",
    "DecodeScheduler",
    "SharedPrefixes",
    "SplitCosts",
    "find_shared_prefixes",
]

_Ints = NDArray[np.int32]
_MIN_SHARED_TILES = 4
"""Minimum length in keys of a shared range; shorter ranges are as fast without sharing."""
_WORDS_PER_COPY = 2
"""int32 values in each int64 that is copied."""
_Rows = NDArray[np.int64]
_MAX_PREFIXES = 64
"""The most prefixes of rows that have the same beginning; it bounds the time of a search."""

_Counts = NDArray[np.int32]
_START_TILES = 3
"""Time to start and end a program."""
_MERGE_TILES = 2
"""Time to merge the parts of a result."""
_MIN_SPARE_ITEMS = 8
_ROW, _LENGTH = NUM_ITEM_WORDS, NUM_ITEM_WORDS + 1
"""Words of an item: its first row, and that row's number of keys."""


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

    def cached_prefixes(self) -> CachedPrefixes:
        """Return the finder of shared prefixes, for `items`."""
        min_blocks = -(-_MIN_SHARED_TILES * self.tile_keys // self.block_size)
        return CachedPrefixes(min_blocks=min_blocks, max_rows=self.rows_per_item)

    def items(
        self,
        seq_lens: _Ints,
        block_tables: _Ints,
        prefixes: CachedPrefixes,
        max_excess: int = 0,
    ) -> _Ints:
        """Return the items of sequences of these lengths, `[num_rows]`; 0 is padding.

        Lengths may be too large by `max_excess`; rows share only keys that they have.

        `block_tables` is `[num_rows, width]`. The result is `words` of `DecodeItems`. A row of a
        length of 0 has an item too.
        """
        starts, ends = self._tiles(seq_lens)
        if max_shared := self._max_shared(len(seq_lens)):
            # The last key of a row is written by this step, so it is never shared.
            num_keys = np.maximum(seq_lens - 1 - max_excess, 0)
            num_blocks = np.minimum(num_keys // self.block_size, block_tables.shape[1])
            shared = prefixes.find(block_tables, num_blocks)
            if len(shared.rows):
                return self._items(*self._shared_units(shared, max_shared, ends), seq_lens)
        items = _kept_items(self, starts.tobytes(), ends.tobytes()).copy()
        items[:, _LENGTH] = seq_lens[items[:, _ROW]]
        return items

    def items_of_tiles(self, starts: _Ints, ends: _Ints) -> _Ints:
        """Return `items` of rows that share nothing, without lengths, by the tiles of each."""
        splits = self.costs.splits(ends - starts, self.max_items(len(ends)))
        no_rows = np.zeros((0, self.rows_per_item), dtype=np.int64)
        units = _Units(no_rows, starts, ends, splits, np.zeros_like(splits))
        return self._items(units, splits, np.zeros_like(splits))

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


class DecodeMemory:
    """Lends the same memory to all decodes that are launched on one stream.

    If more is needed, new memory is allocated. Memory returned before stays valid while the caller
    holds it.
    """

    def __init__(self, device: torch.device) -> None:
        self._latest = DecodeScratch(
            torch.empty(0, dtype=torch.float32, device=device),
            torch.zeros(0, dtype=torch.int32, device=device),
        )

    def reserve(self, num_elements: int, num_arrivals: int) -> DecodeScratch:
        """Return memory of at least this many elements of each tensor."""
        parts, arrivals = self._latest.parts, self._latest.arrivals
        if num_elements > len(parts):
            parts = parts.new_empty(num_elements)
        if num_arrivals > len(arrivals):
            arrivals = arrivals.new_zeros(num_arrivals)
        if parts is not self._latest.parts or arrivals is not self._latest.arrivals:
            self._latest = DecodeScratch(parts, arrivals)
        return self._latest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """The inputs on which the result of a search depends."""

    counts: NDArray[np.int32]
    """Number of leading blocks of each row that the search read, `[num_rows]`."""
    blocks: NDArray[np.int32]
    """`[num_rows, width]`."""
    is_seen: NDArray[np.bool_]
    """Which elements of `blocks` the search read."""

    def is_in(self, block_tables: NDArray[np.int32]) -> bool:
        """Return whether other block tables, of this many blocks, share the same prefixes."""
        is_other = block_tables[:, : self.blocks.shape[1]] != self.blocks
        return not (is_other & self.is_seen).any()


class CachedPrefixes:
    """Finds the shared prefixes of steps; most steps have the prefixes of the step before."""

    def __init__(self, *, min_blocks: int, max_rows: int) -> None:
        """Takes the arguments of `find_shared_prefixes`."""
        self._min_blocks = min_blocks
        self._max_rows = max_rows
        self._kept: tuple[SharedPrefixes, _Seen] | None = None

    def find(
        self, block_tables: NDArray[np.int32], num_blocks: NDArray[np.int32]
    ) -> SharedPrefixes:
        """Return the result of `find_shared_prefixes`."""
        if self._kept is not None:
            found, seen = self._kept
            if len(num_blocks) == len(seen.counts):
                is_same = self._num_seen(num_blocks, found) == seen.counts
                if is_same.all() and seen.is_in(block_tables):
                    return found
        found = find_shared_prefixes(
            block_tables, num_blocks, min_blocks=self._min_blocks, max_rows=self._max_rows
        )
        self._kept = None
        # A search that finds nothing takes no longer than the comparison.
        if len(found.rows):
            counts = self._num_seen(num_blocks, found)
            columns = np.arange(counts.max(), dtype=np.int32)
            seen = _Seen(
                counts=counts,
                blocks=block_tables[:, : len(columns)].copy(),
                is_seen=columns < counts[:, None],
            )
            self._kept = found, seen
        return found

    def _num_seen(self, num_blocks: NDArray[np.int32], found: SharedPrefixes) -> NDArray[np.int32]:
        # Of a row with too few blocks to share any, the search read only their number.
        return np.where(num_blocks < self._min_blocks, 0, np.minimum(num_blocks, found.reach))


class DecodeScheduler:
    """Uploads one schedule at a time; a captured graph has a scheduler of its own.

    It keeps the memory that the graph was captured with.
    """

    def __init__(
        self,
        division: DecodeDivision,
        params: AttentionParams,
        memory: DecodeMemory,
        device: torch.device,
        *,
        is_graph: bool,
    ) -> None:
        """`is_graph`: steps have the same number of rows, and their items the same addresses."""
        self._division = division
        self._prefixes = division.cached_prefixes()
        self._params = params
        self._memory = memory
        self._is_graph = is_graph
        self._scratch: DecodeScratch | None = None
        self._latest: tuple[NDArray[np.int32], DecodeItems] | None = None
        """Items that depend on these lengths alone."""
        self._pinned = PinnedRing(device)
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)

    def items_of(
        self,
        seq_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        max_excess: int = 0,
    ) -> DecodeItems:
        """Return the items of a step's decodes, valid until the next call.

        `seq_lens` is `[num_rows]`, 0 for padding, and `block_tables` `[num_rows, width]`. Lengths
        may be too large by `max_excess`.
        """
        num_rows, params = len(seq_lens), self._params
        if self._latest is not None:
            lengths, items_of_step = self._latest
            if seq_lens is lengths or np.array_equal(seq_lens, lengths):
                # Another group of layers has the same lengths.
                return items_of_step
        if self._is_graph and num_rows == 1 and self._division.rows_per_item > 1:
            # The kernel for one row per item is simpler.
            self._division = replace(self._division, rows_per_item=1)
        items = self._division.items(seq_lens, block_tables, self._prefixes, max_excess)
        words = self._upload(items, num_rows)
        max_parts = self._division.max_parts(num_rows)
        # A captured graph holds the addresses; the memory's owner holds only the last loan.
        if self._scratch is None or not self._is_graph:
            self._scratch = self._memory.reserve(
                max_parts * params.num_heads * (params.head_size + 1),
                num_rows * params.num_kv_heads,
            )
        items_of_step = DecodeItems(words, max_parts, self._scratch)
        # Without a window, rows may share keys, which depends on the block tables.
        if params.sliding_window is not None:
            self._latest = seq_lens, items_of_step
        return items_of_step

    def _upload(self, items: NDArray[np.int32], num_rows: int) -> torch.Tensor:
        size, num_words = items.size, items.shape[1]
        num_items = self._division.max_items(num_rows) if self._is_graph else len(items)
        num_copied = num_items * num_words // _WORDS_PER_COPY
        if num_copied > len(self._on_device):
            # A captured graph holds the address.
            assert not (self._is_graph and len(self._on_device))
            capacity = num_copied if self._is_graph else 1 << (num_copied - 1).bit_length()
            self._on_device = self._on_device.new_empty(capacity)
        with self._pinned.next_buffer(num_copied) as words:
            host = words.view(torch.int32).numpy()
            host[:size] = items.reshape(-1)
            # Items without work.
            host[size:] = 0
            copy_from_host(self._on_device[:num_copied], words)
        return self._on_device[:num_copied].view(torch.int32).view(num_items, num_words)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Disjoint sets of rows with equal first blocks in their block tables.

    The sets of the prefix that saves the most blocks come first.
    """

    rows: _Rows
    """`[num_sets, max_rows]`, at least 2 in each set, then -1."""
    num_blocks: _Rows
    """How many blocks the rows of each set share, `[num_sets]`."""
    reach: NDArray[np.int32]
    """How many blocks of each row the sets depend on, or on all if it has fewer, `[num_rows]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rows in groups of at least two; the rows of a group are adjacent."""

    rows: _Rows
    ids: NDArray[np.int32]
    """The id of the group of each row, ascending, `[num_rows]`."""
    owners: _Rows
    """The index of the group of each row, `[num_rows]`."""
    firsts: _Rows
    """Where each group begins, `[num_groups]`."""

    @classmethod
    def none(cls) -> _Groups:
        """Return no groups."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none.astype(np.int32), none, none)

    @classmethod
    def of(cls, rows: _Rows, ids: NDArray[np.int32]) -> _Groups:
        """Return groups by their ids, which are ascending, without rows that are alone."""
        is_first = np.ones(len(rows) + 1, dtype=np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=is_first[1:-1])
        if is_first.all():
            return cls.none()
        is_chosen = ~(is_first[:-1] & is_first[1:])
        is_first = is_first[:-1][is_chosen]
        owners = np.cumsum(is_first) - 1
        return cls(rows[is_chosen], ids[is_chosen], owners, np.flatnonzero(is_first))

    def chosen(self, is_chosen: NDArray[np.bool_]) -> _Groups:
        """Return the groups of these of the rows."""
        return _Groups.of(self.rows[is_chosen], self.ids[is_chosen])


def find_shared_prefixes(
    block_tables: NDArray[np.int32],
    num_blocks: NDArray[np.int32],
    *,
    min_blocks: int,
    max_rows: int,
) -> SharedPrefixes:
    """Return sets of at most `max_rows` rows that share at least `min_blocks` blocks, 1 or more.

    `block_tables` is `[num_rows, width]`; of each row the first `num_blocks`, `[num_rows]`, may be
    shared. A row that could share several prefixes shares the prefix that saves the most blocks.
    """
    reach = np.full(len(num_blocks), min_blocks, dtype=np.int32)
    groups = _alike(block_tables, num_blocks, min_blocks)
    found: list[tuple[_Groups, _Rows]] = []
    for _ in range(_MAX_PREFIXES):
        if not len(groups.rows):
            break
        depths = _depths(block_tables, num_blocks, groups)
        deepest = np.maximum.reduceat(depths, groups.firsts)[groups.owners]
        reach[groups.rows] = np.maximum(reach[groups.rows], deepest + 1)
        best = _best_depths(depths, groups)
        is_deep = best >= min_blocks
        is_shared = (depths >= best[groups.owners]) & is_deep[groups.owners]
        is_shared[groups.firsts] = is_deep
        found.append((groups.chosen(is_shared), best[is_deep]))
        # The first row leaves its group, with or without a prefix.
        is_shared[groups.firsts] = True
        groups = groups.chosen(~is_shared)
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return SharedPrefixes(rows=none.reshape(0, max_rows), num_blocks=none, reach=reach)
    return _sets(found, max_rows, reach)


def _alike(
    block_tables: NDArray[np.int32], num_blocks: NDArray[np.int32], min_blocks: int
) -> _Groups:
    """Return groups of rows; rows of different groups share too little."""
    rows = np.flatnonzero(num_blocks >= min_blocks)
    if len(rows) < 2:
        return _Groups.none()
    blocks = block_tables[rows, min_blocks - 1]
    order = np.argsort(blocks, kind="stable")
    return _Groups.of(rows[order], blocks[order])


def _depths(
    block_tables: NDArray[np.int32], num_blocks: NDArray[np.int32], groups: _Groups
) -> _Rows:
    """Return how many blocks each row shares with the first of its group, 0 for the first."""
    leaders = groups.rows[groups.firsts][groups.owners]
    limits = np.minimum(num_blocks[groups.rows], num_blocks[leaders])
    limits[groups.firsts] = 0
    width = int(limits.max())
    differs = np.ones((len(limits), width + 1), dtype=np.bool_)
    tables = block_tables[:, :width]
    np.not_equal(tables[groups.rows], tables[leaders], out=differs[:, :width])
    depths: _Rows = np.minimum(differs.argmax(axis=1), limits)
    return depths


def _best_depths(depths: _Rows, groups: _Groups) -> _Rows:
    """Return the depth at which each group's rows save the most blocks, `[num_groups]`."""
    depths = depths[np.lexsort((-depths, groups.owners))]
    # So many rows of the group have at least this depth; the first row, at 0, comes last.
    num_sharing = np.arange(1, len(depths) + 1) - groups.firsts[groups.owners]
    saved = depths * num_sharing
    is_best = saved == np.maximum.reduceat(saved, groups.firsts)[groups.owners]
    return np.maximum.reduceat(np.where(is_best, depths, 0), groups.firsts)


def _sets(
    found: list[tuple[_Groups, _Rows]], max_rows: int, reach: NDArray[np.int32]
) -> SharedPrefixes:
    """Return as few sets as each prefix needs; a last row that would be alone has none."""
    rows = np.concatenate([groups.rows for groups, _ in found])
    counts = np.concatenate([np.bincount(groups.owners) for groups, _ in found])
    ids = np.concatenate([groups.ids[groups.firsts] for groups, _ in found])
    num_blocks = np.concatenate([best for _, best in found])
    ends = np.cumsum(counts)
    order = np.lexsort((ids, -num_blocks * (counts - 1)))
    num_sets = -(-(counts[order] - 1) // max_rows)
    prefixes = np.repeat(order, num_sets)
    ordinals = np.arange(len(prefixes)) - np.repeat(np.cumsum(num_sets) - num_sets, num_sets)
    places = ((ends - counts)[prefixes] + ordinals * max_rows)[:, None] + np.arange(max_rows)
    is_row = places < ends[prefixes][:, None]
    return SharedPrefixes(
        rows=np.where(is_row, rows.take(places, mode="clip"), -1),
        num_blocks=num_blocks[prefixes],
        reach=reach,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCosts:
    """The resources of a GPU for one KV head."""

    num_slots: int
    """Programs that run at the same time, at least 1."""
    num_saturating: float
    """Number of programs that together use the whole memory bandwidth."""

    def max_items(self, num_units: int) -> int:
        """Return an upper bound of the items of this many ranges.

        It is few more than there are ranges, or than run at the same time: programs of a graph take
        places also without work.
        """
        return max(num_units, self.num_slots) + max(_MIN_SPARE_ITEMS, self.num_slots // 4)

    def splits(self, tiles: _Counts, max_items: int) -> _Counts:
        """Return into how many items each range of this many tiles is split, `[num_units]`.

        Some may have no tiles, and are an item too. With more ranges than slots, no item is longer
        than an even share of all tiles, if `max_items` allows it. The result is read-only.
        """
        return _kept_splits(self, tiles.astype(np.int32, copy=False).tobytes(), max_items)

    def find_splits(self, tiles: _Counts, max_items: int) -> _Counts:
        """Compute `splits`."""
        total, longest = int(tiles.sum()), int(tiles.max(initial=0))
        fair = max(1, -(-total // self.num_slots))
        most = fair
        if longest > fair and len(tiles) <= self.num_slots:
            wide = max(1, -(-total // max(1, int(self.num_saturating))))
            choices = {longest, min(longest, wide), min(longest, 2 * fair), fair}
            most = min(choices, key=lambda one: (self._time(tiles, one), -one))
        splits = _splits(tiles, most)
        while int(splits.sum()) > max_items:
            most += -(-most // 4)
            splits = _splits(tiles, most)
        return splits

    def _time(self, tiles: _Counts, most: int) -> float:
        """Return the approximate time if no item has more than `most` tiles."""
        counts = -(-tiles // most)
        num_items = int(counts.sum())
        merging = _MERGE_TILES if num_items > np.count_nonzero(tiles) else 0
        lengths = np.repeat(-(-tiles // np.maximum(counts, 1)), counts)
        if num_items > self.num_slots:
            # The last programs start when others have ended, and do not use the whole bandwidth.
            reading = max(most, int(tiles.sum()) / self.num_saturating)
            late = int(np.sort(lengths)[num_items - self.num_slots - 1])
            return 2 * _START_TILES + reading + 0.75 * late + merging
        # Programs that read a tile at the same time share the memory bandwidth.
        running = np.cumsum(np.bincount(lengths)[::-1])[::-1][1:]
        reading = float(np.maximum(1.0, running / self.num_saturating).sum())
        return _START_TILES + reading + merging


@lru_cache(maxsize=64)
def _kept_items(division: DecodeDivision, starts: bytes, ends: bytes) -> _Ints:
    """Return `items_of_tiles`: few steps begin a tile, so that most have the items of the last."""
    items = division.items_of_tiles(np.frombuffer(starts, np.int32), np.frombuffer(ends, np.int32))
    items.flags.writeable = False
    return items


@lru_cache(maxsize=64)
def _kept_splits(costs: SplitCosts, tiles: bytes, max_items: int) -> _Counts:
    """Return `splits`: few rows have as many tiles as in the step before, whatever the tokens."""
    splits = costs.find_splits(np.frombuffer(tiles, np.int32), max_items)
    splits.flags.writeable = False
    return splits


def _splits(tiles: _Counts, most: int) -> _Counts:
    return np.maximum(-(-tiles // most), 1)
