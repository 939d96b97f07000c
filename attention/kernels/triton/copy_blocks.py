"""Copies whole blocks within one cache, by a list on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["copy_blocks"]

_TILE = 2048
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _copy_words(
    cache: tl.tensor, pairs: tl.tensor, block_words: tl.tensor, tile: tl.constexpr
) -> None:
    """Copy `tile` words of one block to another.

    Launched by `copy_blocks`; grid `(num_pairs, tiles of a block)`. Pointers: cache
    `[num_blocks, block_words]` of any integer dtype, pairs `[num_pairs, 2]` int64.
    """
    pair = tl.program_id(0).to(tl.int64)
    source = tl.load(pairs + 2 * pair)
    destination = tl.load(pairs + 2 * pair + 1)
    words = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)
    is_word = words < block_words
    content = tl.load(cache + source * block_words + words, mask=is_word)
    tl.store(cache + destination * block_words + words, content, mask=is_word)


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy block `src` to block `dst`, all layers, for each row of int64 `pairs`, `[n, 2]`.

    `cache` is that of all layers, and contiguous. The caller guarantees that no block is both a
    source and a destination, and that no destination repeats.
    """
    assert cache.is_contiguous()
    assert pairs.is_contiguous()
    assert (pairs.dtype, pairs.shape[1]) == (torch.int64, 2)
    if not len(pairs):
        return
    block_bytes = cache[0].numel() * cache.element_size()
    word = next(word for word in _WORDS if block_bytes % word.itemsize == 0)
    block_words = block_bytes // word.itemsize
    _copy_words[(len(pairs), triton.cdiv(block_words, _TILE))](
        cache.view(len(cache), -1).view(word), pairs, block_words, tile=_TILE, num_warps=4
    )
