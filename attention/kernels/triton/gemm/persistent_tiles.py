"""The tiles of a product that persistent programs compute, one after another.

Tiles that are computed at the same time lie close together, so that the L2 cache serves most of
their operands ("grouped ordering" in Triton's tutorials on matrix products).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = [
    "TILE_DEPTH",
    "TILE_GROUP",
    "TILE_ROWS",
    "can_copy_tiles",
    "num_tiles",
    "stored_share",
    "tile_origin",
]

TILE_ROWS = 128
TILE_DEPTH = 64
"""Elements of a row per iteration: 128 bytes, the widest swizzle of shared memory."""
TILE_GROUP = 16
"""Tiles of a column that are computed before the next column."""

_DTYPES = (torch.float16, torch.bfloat16)
_ALIGNMENT = 16
"""Bytes of which addresses and strides of a bulk copy are multiples."""


def can_copy_tiles(weight: torch.Tensor) -> bool:
    """Return whether bulk copies can load tiles of a weight, and of rows that it multiplies."""
    return weight.dtype in _DTYPES and weight.stride(0) * weight.itemsize % _ALIGNMENT == 0


def num_tiles(num_rows: int, num_columns: int, tile_columns: int) -> int:
    """Return the number of tiles of an output."""
    return -(-num_rows // TILE_ROWS) * -(-num_columns // tile_columns)


def stored_share(num_rows: int, num_columns: int, tile_columns: int, num_programs: int) -> float:
    """Return the share of computed values that is stored, until the last program ends."""
    num_turns = max(1, -(-num_tiles(num_rows, num_columns, tile_columns) // num_programs))
    return num_rows * num_columns / (num_turns * num_programs * TILE_ROWS * tile_columns)


@triton.jit
def tile_origin(
    tile: tl.tensor,
    num_down: tl.tensor,
    num_across: tl.constexpr,
    group: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first row and column of a tile, of `num_down` times `num_across`.

    Tiles are counted down a column of `group` tiles, then across, then down to the next group.
    """
    first = tile // (group * num_across) * group
    height = tl.minimum(num_down - first, group)
    place = tile % (group * num_across)
    return (first + place % height) * tile_rows, place // height * tile_columns
