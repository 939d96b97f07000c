"""The one KV cache layout of all backends, and what moves whole blocks of it.

The layout is block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`,
contiguous: a block of all layers is one contiguous chunk, and layer `l` sees `cache[:, l]`.
"""

from collections.abc import Iterator, Sequence

import torch

__all__ = ["copy_blocks", "kv_cache_shape", "swap_blocks"]


def kv_cache_shape(
    *, num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int, int]:
    """Return the shape of a cache; index 0 of the third axis holds keys, 1 holds values."""
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_size)


def swap_blocks(
    src_cache: torch.Tensor, dst_cache: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy block `src` of one cache to block `dst` of the other, all layers, for each pair.

    Each cache is on any device. Sources may repeat; destinations may not. Neighbouring pairs
    `(s, d), (s + 1, d + 1)` are one copy, so sorted pairs are fastest. A copy between a GPU and
    pinned memory is only enqueued on the current stream: wait for it before the host reads or
    rewrites the pinned side, or before another stream uses the GPU side.
    """
    if src_cache.shape[1:] != dst_cache.shape[1:] or src_cache.dtype != dst_cache.dtype:
        raise ValueError(
            f"Blocks differ: source {tuple(src_cache.shape[1:])} {src_cache.dtype}, "
            f"destination {tuple(dst_cache.shape[1:])} {dst_cache.dtype}."
        )
    _check(pairs, len(src_cache), len(dst_cache))
    for src, dst, length in _runs(pairs):
        dst_cache[dst : dst + length].copy_(src_cache[src : src + length], non_blocking=True)


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `src` to block `dst` within a cache, all layers, for each pair.

    All pairs happen at once: each source is read as it was before the call, even when it is
    also a destination. So one list may fork a block many times, hand a block on and reuse its
    old place, or exchange two blocks. Destinations may not repeat.
    """
    _check(pairs, len(cache), len(cache))
    sources = {src for src, _ in pairs}
    if sources.isdisjoint(dst for _, dst in pairs):
        for src, dst, length in _runs(pairs):
            cache[dst : dst + length].copy_(cache[src : src + length])
        return
    src_ids, dst_ids = torch.tensor(pairs, device=cache.device).unbind(1)
    cache.index_copy_(0, dst_ids, cache.index_select(0, src_ids))


def _check(pairs: Sequence[tuple[int, int]], num_src: int, num_dst: int) -> None:
    destinations = {dst for _, dst in pairs}
    if len(destinations) != len(pairs):
        raise ValueError(f"A destination block is named twice in {list(pairs)}.")
    for src, dst in pairs:
        if not (0 <= src < num_src and 0 <= dst < num_dst):
            raise ValueError(
                f"Pair ({src}, {dst}) is outside caches of {num_src} and {num_dst} blocks."
            )


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (first source, first destination, length) of each run of neighbouring pairs."""
    start = 0
    for i in range(1, len(pairs) + 1):
        offset = i - start
        src, dst = pairs[start]
        if i == len(pairs) or pairs[i] != (src + offset, dst + offset):
            yield src, dst, offset
            start = i
