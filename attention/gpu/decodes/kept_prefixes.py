"""Keeps the shared prefixes of a step for later steps, until a search could find others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attention.gpu.decodes.shared_prefixes import find_shared_prefixes

if TYPE_CHECKING:
    from attention.gpu.decodes.shared_prefixes import SharedPrefixes

__all__ = ["KeptPrefixes"]


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


class KeptPrefixes:
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
