"""Finds the sequences of a step whose first blocks are the same blocks of the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SharedPrefix", "find_shared_prefixes"]

_MAX_PREFIXES = 64
"""Of those whose rows begin alike, which bounds the time of a search."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrefix:
    """Rows whose block tables begin with the same blocks."""

    rows: NDArray[np.int64]
    """`[>= 2]`."""
    num_blocks: int

    @property
    def num_saved_blocks(self) -> int:
        """Return how many blocks less are read if one program reads them for all rows."""
        return self.num_blocks * (len(self.rows) - 1)


def find_shared_prefixes(
    block_tables: NDArray[np.int32], num_blocks: NDArray[np.int32], *, min_blocks: int
) -> list[SharedPrefix]:
    """Return disjoint sets of rows that share at least `min_blocks` blocks, 1 or more.

    `block_tables` is `[num_rows, width]`; of each row the first `num_blocks`, `[num_rows]`, may be
    shared. A row that could be in several sets is in the one that saves the most blocks.
    """
    rows = np.flatnonzero(num_blocks >= min_blocks)
    if len(rows) < 2:
        return []
    # Rows that differ here share too little.
    blocks = block_tables[rows, min_blocks - 1]
    order = np.argsort(blocks, kind="stable")
    is_same = np.diff(blocks[order]) == 0
    if not is_same.any():
        return []
    groups = np.split(rows[order], np.flatnonzero(~is_same) + 1)
    prefixes: list[SharedPrefix] = []
    for members in groups:
        for _ in range(_MAX_PREFIXES):
            if len(members) < 2:
                break
            shared, members = _first_prefix(block_tables, num_blocks, members, min_blocks)
            if shared is not None:
                prefixes.append(shared)
    return prefixes


def _first_prefix(
    block_tables: NDArray[np.int32],
    num_blocks: NDArray[np.int32],
    rows: NDArray[np.int64],
    min_blocks: int,
) -> tuple[SharedPrefix | None, NDArray[np.int64]]:
    """Return the best prefix of the first of at least two rows, and the rows without it."""
    limits = np.minimum(num_blocks[rows], num_blocks[rows[0]])
    tables = block_tables[rows, : int(limits.max())]
    differs = tables != tables[0]
    depths = np.where(differs.any(axis=1), differs.argmax(axis=1), tables.shape[1])
    depths = np.minimum(depths, limits)
    depths[0] = limits[0]
    # The first row is as deep as any; with the n-th deepest row, n rows share its depth.
    descending = np.sort(depths[1:])[::-1]
    best = int((descending * np.arange(1, len(rows))).argmax())
    depth = int(descending[best])
    if depth < min_blocks:
        return None, rows[1:]
    is_shared = depths >= depth
    return SharedPrefix(rows[is_shared], depth), rows[~is_shared]
