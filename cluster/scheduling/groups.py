"""Block tables of several groups of layers, some of which see only a window of the tokens.

A table has an entry for every `block_size` tokens, and an entry a block in each group: they are
flattened entry by entry. Blocks of a window group that no later query sees are dead: they are
released while the sequence runs, and their places hold `NO_BLOCK`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pagedray.layout import num_entries_before, num_held_blocks

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

__all__ = ["NO_BLOCK", "GroupTables"]

NO_BLOCK = -1
"""The place of a block that was released, or that was not needed when the sequence started."""
Table = TypeVar("Table", list[int], "array[int]")


class GroupTables:
    """Counts and finds the places of block tables that queries see."""

    __slots__ = (
        "_block_size",
        "_full",
        "_step_tokens",
        "_windowed",
        "_windows",
        "has_windows",
        "is_uniform",
        "num_groups",
        "num_state_blocks",
    )

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        block_size: int,
        step_tokens: int,
        num_state_blocks: int = 0,
    ) -> None:
        """A step computes at most `step_tokens` of a sequence."""
        self._windows = tuple(windows)
        self._block_size = block_size
        self._step_tokens = step_tokens
        self.num_groups = len(self._windows)
        self.num_state_blocks = num_state_blocks
        """Blocks of the recurrent state of a sequence, which are in no table; 0 without states."""
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._windowed = [
            (group, window) for group, window in enumerate(windows) if window is not None
        ]
        self.has_windows = bool(self._windowed)
        """Whether blocks are released while sequences run."""
        self.is_uniform = self._windows == (None,)
        """Whether there is a single group in which queries see all tokens."""

    @property
    def num_full(self) -> int:
        """The groups in which queries see all tokens, which are the first groups."""
        return len(self._full)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` holds at most.

        Until its state is copied to its row, it also holds that.
        """
        if not self._windowed:
            return -(-num_tokens // self._block_size) * self.num_groups + self.num_state_blocks
        return self.num_state_blocks + num_held_blocks(
            num_tokens,
            windows=self._windows,
            block_size=self._block_size,
            step_tokens=self._step_tokens,
        )

    def num_dead(self, position: int) -> list[int]:
        """Return the dead entries of each group when the next query is at `position`."""
        size = self._block_size
        return [
            0 if window is None else num_entries_before(position, window=window, block_size=size)
            for window in self._windows
        ]

    def num_missing(self, num_tokens: int, *, num_entries: int, num_dead: Sequence[int]) -> int:
        """Return the blocks to reserve for a table of `num_entries` that is to hold `num_tokens`.

        Dead blocks are released and used again meanwhile.
        """
        num_left = -(-num_tokens // self._block_size) - num_entries
        num_blocks = num_left * len(self._full)
        for group, window in self._windowed:
            most = -(-(window + self._step_tokens) // self._block_size) + 1
            num_blocks += max(0, min(num_left, most - num_entries + num_dead[group]))
        return num_blocks

    def num_live(self, *, num_entries: int, first: int, num_dead: Sequence[int]) -> int:
        """Return the blocks of a table from entry `first` on that are not dead."""
        return sum(num_entries - max(first, dead) for dead in num_dead)

    def num_seen(self, num_entries: int, most: int) -> int:
        """Return an upper bound of the cached blocks that a longer prefix has beyond a shorter one.

        The shorter prefix has `num_entries` and no prefix more than `most`.
        """
        num_blocks = (most - num_entries) * len(self._full)
        for _, window in self._windowed:
            num_blocks += min(most, -(-window // self._block_size))
        return num_blocks

    def longest_prefix(self, most: int, has: Callable[[int, int], bool], *, first: int) -> int:
        """Return the entries of the longest prefix without a missing block that a next query sees.

        `has` returns whether the block of an entry and a group is there. The prefix has at most
        `most` entries, of which the first have their blocks in groups without a window.
        """
        end = first
        while self._full and end < most and all(has(end, group) for group in self._full):
            end += 1
        if not self._full:
            end = most
        # By group, all blocks from this entry to the end are there.
        known = dict.fromkeys(self._windowed, end)
        is_found = False
        while not is_found:
            is_found = True
            for group, window in known:
                index = min(known[group, window], end)
                needed = num_entries_before(
                    end * self._block_size, window=window, block_size=self._block_size
                )
                while index > needed and has(index - 1, group):
                    index -= 1
                known[group, window] = index
                if index > needed:
                    end, is_found = index - 1, False
        return end

    def live_blocks(self, table: Table) -> Table:
        """Return the blocks of a table, without places of dead blocks."""
        if not self._windowed:
            return table
        live = table[:0]
        live.extend(block for block in table if block >= 0)
        return live
