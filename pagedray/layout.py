"""How the KV cache is laid out: groups of layers that share one pool of equal blocks.

A block holds `block_size` tokens of the layers of one group. Every `block_size` tokens of a
sequence, an entry of its block table, take one block in each group. A group whose layers have a
sliding window frees the blocks behind the window.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CacheGroup", "CacheLayout", "cache_layout", "num_entries_before", "num_held_blocks"]

_MAX_GROUPS = 16
_LONG_CONTEXT = 32768
_MAX_WASTE = 0.15
"""Bytes of unused places, relative to used places, that need no search."""
_GROUP_COST = 0.02
"""Waste that is worth a group less: each group has a table in every step."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with one block table."""

    layers: tuple[int, ...]
    """Places of the layers among the cached layers, in the order of their places in a block."""
    window: int | None
    """Tokens that a query sees, its own token included; None for all."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The groups of a model; uniform models have one."""

    block_size: int
    """Tokens per block."""
    groups: tuple[CacheGroup, ...]
    """A group without a window comes first if there is one."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(group.window for group in self.groups)


def num_held_blocks(
    num_tokens: int, *, windows: Sequence[int | None], block_size: int, step_tokens: int
) -> int:
    """Return the blocks that a sequence of `num_tokens` holds at most, of groups with `windows`.

    A step computes at most `step_tokens` of them.
    """
    num_entries = -(-num_tokens // block_size)
    num_blocks = 0
    for window in windows:
        most = num_entries
        if window is not None:
            # One more, since neither end of the window lies at the border of a block.
            most = min(most, -(-(window + step_tokens) // block_size) + 1)
        num_blocks += most
    return num_blocks


def num_entries_before(position: int, *, window: int, block_size: int) -> int:
    """Return the entries of a block table that a query at `position` and later queries ignore."""
    return max(position - window + 1, 0) // block_size


def cache_layout(
    windows: Sequence[int | None], block_size: int, layer_bytes: Sequence[int] | None = None
) -> CacheLayout:
    """Return the groups of cached layers with these windows.

    `layer_bytes` has the bytes of the tokens of a block in each layer; None means equal layers. All
    blocks have the same size: layers of equal window and size are cut into groups that fill it.
    """
    sizes = [1] * len(windows) if layer_bytes is None else list(layer_bytes)
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for layer, kind in enumerate(zip(windows, sizes, strict=True)):
        kinds.setdefault(kind, []).append(layer)
    block_bytes = _block_bytes(Counter({kind: len(layers) for kind, layers in kinds.items()}))
    groups: list[CacheGroup] = []
    for window, size in sorted(kinds, key=_is_wide, reverse=True):
        layers, length = kinds[window, size], block_bytes // size
        groups += (
            CacheGroup(tuple(layers[first : first + length]), window)
            for first in range(0, len(layers), length)
        )
    return CacheLayout(block_size, tuple(groups))


def _is_wide(kind: tuple[int | None, int]) -> tuple[bool, int]:
    """Return the order of a kind of layers: no window, then the largest window, comes last."""
    return kind[0] is None, kind[0] or 0


def _block_bytes(kinds: Counter[tuple[int | None, int]]) -> int:
    """Return the bytes of a block for numbers of layers by window and bytes of a layer.

    They are a multiple of the bytes of every layer, which starts at a multiple of its bytes.
    """
    if not kinds:
        return 1
    totals = [size * count for (_, size), count in kinds.items()]
    # Of a long context, a window keeps only a part.
    parts = [min(window or _LONG_CONTEXT, _LONG_CONTEXT) / _LONG_CONTEXT for window, _ in kinds]

    def cost(block_bytes: int) -> tuple[int, float]:
        """Return the groups, and the mean waste in short and in long contexts."""
        counts = [-(-total // block_bytes) for total in totals]
        short = sum(counts) * block_bytes / sum(totals)
        held = sum(part * count for part, count in zip(parts, counts, strict=True)) * block_bytes
        long = held / sum(part * total for part, total in zip(parts, totals, strict=True))
        return sum(counts), (short + long) / 2.0 - 1.0

    step, smallest = math.lcm(*(size for _, size in kinds)), min(totals)
    if smallest % step == 0:
        num_groups, waste = cost(smallest)
        if num_groups <= _MAX_GROUPS and waste <= _MAX_WASTE:
            return smallest
    # Blocks of other sizes waste places in the groups of every kind.
    costs = {size: cost(size) for size in range(step, max(*totals, step) + 1, step)}
    most_groups = max(_MAX_GROUPS, min(num_groups for num_groups, _ in costs.values()))
    fitting = {size: one for size, one in costs.items() if one[0] <= most_groups}
    return min(fitting, key=lambda size: (fitting[size][1] + _GROUP_COST * fitting[size][0], -size))
