"""Products of a few hundred rows whose inputs are divided, so that they keep a GPU busy.

A weight of few output columns has fewer tiles than a GPU has multiprocessors. Several of these then
multiply parts of the inputs of one tile (split-K), and the parts are added in the end. cuBLAS does
so too, and adds the parts in a kernel of its own. Here the norm that follows adds them.
"""

from __future__ import annotations

import torch

from attention.kernels.row_types import SplitKPartials

__all__ = ["is_faster_split", "split_product"]

_NUM_PARTS = 2
_TILE_ROWS, _TILE_COLUMNS = 128, 128
_LEAST_INPUTS = 8192
"""Shorter products were not measured."""


def is_faster_split(num_rows: int, weight: torch.Tensor, num_multiprocessors: int) -> bool:
    """Return whether a product and a norm take less time with `split_product`.

    `weight` is `[out_size, in_size]`. They do if all parts of all tiles run at the same time.
    """
    out_size, in_size = weight.shape
    num_tiles = -(-num_rows // _TILE_ROWS) * -(-out_size // _TILE_COLUMNS)
    is_long = in_size >= _LEAST_INPUTS and in_size % (_NUM_PARTS * _TILE_COLUMNS) == 0
    return is_long and _NUM_PARTS * num_tiles <= num_multiprocessors


def split_product(x: torch.Tensor, weight: torch.Tensor) -> SplitKPartials:
    """Return `x @ weight.T` in parts, on a GPU.

    `x` is `[num_rows, in_size]`, and `weight` `[out_size, in_size]`, both in 16 bits.
    """
    inputs = x.unflatten(1, (_NUM_PARTS, -1)).transpose(0, 1)
    weights = weight.unflatten(1, (_NUM_PARTS, -1)).permute(1, 2, 0)
    return SplitKPartials(torch.bmm(inputs, weights, out_dtype=torch.float32))
