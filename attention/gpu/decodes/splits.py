"""Chooses how ranges of keys are split among the programs of one KV head, by a model of a GPU.

The unit of all times is the time of a program for a tile of keys when memory is not the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SplitCosts"]

_Ints = NDArray[np.int32]

_START_TILES = 3
"""Time to start and end a program."""
_MERGE_TILES = 2
"""Time to merge the parts of a result."""
_MIN_SPARE_ITEMS = 8


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

    def splits(self, tiles: _Ints, max_items: int) -> _Ints:
        """Return into how many items each range of this many tiles is split, `[num_units]`.

        Some may have no tiles, and are an item too. With more ranges than slots, no item is longer
        than an even share of all tiles, if `max_items` allows it.
        """
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

    def _time(self, tiles: _Ints, most: int) -> float:
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


def _splits(tiles: _Ints, most: int) -> _Ints:
    return np.maximum(-(-tiles // most), 1)
