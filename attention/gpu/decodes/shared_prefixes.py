"""Finds sequences that begin with the same blocks of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedPrefixes", "find_shared_prefixes"]

_Ints = NDArray[np.int64]

_MAX_PREFIXES = 64
"""The most prefixes of rows that have the same beginning; it bounds the time of a search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedPrefixes:
    """Disjoint sets of rows with equal first blocks in their block tables.

    The sets of the prefix that saves the most blocks come first.
    """

    rows: _Ints
    """`[num_sets, max_rows]`, at least 2 in each set, then -1."""
    num_blocks: _Ints
    """How many blocks the rows of each set share, `[num_sets]`."""
    reach: NDArray[np.int32]
    """How many blocks of each row the sets depend on, or on all if it has fewer, `[num_rows]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rows in groups of at least two; the rows of a group are adjacent."""

    rows: _Ints
    ids: NDArray[np.int32]
    """The id of the group of each row, ascending, `[num_rows]`."""
    owners: _Ints
    """The index of the group of each row, `[num_rows]`."""
    firsts: _Ints
    """Where each group begins, `[num_groups]`."""

    @classmethod
    def none(cls) -> _Groups:
        """Return no groups."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none.astype(np.int32), none, none)

    @classmethod
    def of(cls, rows: _Ints, ids: NDArray[np.int32]) -> _Groups:
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
    found: list[tuple[_Groups, _Ints]] = []
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
) -> _Ints:
    """Return how many blocks each row shares with the first of its group, 0 for the first."""
    leaders = groups.rows[groups.firsts][groups.owners]
    limits = np.minimum(num_blocks[groups.rows], num_blocks[leaders])
    limits[groups.firsts] = 0
    width = int(limits.max())
    differs = np.ones((len(limits), width + 1), dtype=np.bool_)
    tables = block_tables[:, :width]
    np.not_equal(tables[groups.rows], tables[leaders], out=differs[:, :width])
    depths: _Ints = np.minimum(differs.argmax(axis=1), limits)
    return depths


def _best_depths(depths: _Ints, groups: _Groups) -> _Ints:
    """Return the depth at which each group's rows save the most blocks, `[num_groups]`."""
    depths = depths[np.lexsort((-depths, groups.owners))]
    # So many rows of the group have at least this depth; the first row, at 0, comes last.
    num_sharing = np.arange(1, len(depths) + 1) - groups.firsts[groups.owners]
    saved = depths * num_sharing
    is_best = saved == np.maximum.reduceat(saved, groups.firsts)[groups.owners]
    return np.maximum.reduceat(np.where(is_best, depths, 0), groups.firsts)


def _sets(
    found: list[tuple[_Groups, _Ints]], max_rows: int, reach: NDArray[np.int32]
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
