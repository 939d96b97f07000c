"""The KV cache layout of all backends, and copies of whole blocks.

The layout is block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]`,
contiguous: a block of all layers is one contiguous chunk, and layer `l` sees `cache[:, l]`. A cache
of layers of several shapes is `[num_blocks, num_elements]`, which each shape views as its own.
"""

from collections.abc import Sequence

import torch

__all__ = [
    "check_pairs",
    "copy_blocks",
    "kv_cache_shape",
    "layers_of_shape",
    "runs_of",
    "swap_blocks",
]


def kv_cache_shape(
    *, num_blocks: int, num_layers: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int, int, int]:
    """Return the shape of a cache; index 0 of the third axis holds keys, 1 holds values."""
    return (num_blocks, num_layers, 2, block_size, num_kv_heads, head_size)


def layers_of_shape(
    cache: torch.Tensor, *, block_size: int, num_kv_heads: int, head_size: int
) -> torch.Tensor:
    """Return a cache as layers of this shape see it: with six dimensions."""
    return cache.view(len(cache), -1, 2, block_size, num_kv_heads, head_size)


def swap_blocks(
    src_cache: torch.Tensor, dst_cache: torch.Tensor, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy block `src` of one cache to block `dst` of the other, all layers, for each pair.

    The caches may be on any device. Sources may repeat; destinations may not. Adjacent pairs `(s,
    d), (s + 1, d + 1)` are one copy, so sorted pairs are fastest. A copy between a GPU and pinned
    memory is asynchronous on the current stream: synchronize before the host reads or rewrites the
    pinned side, or before another stream uses the GPU side. Raises ValueError if the blocks of the
    caches differ, and for invalid pairs.
    """
    if src_cache.shape[1:] != dst_cache.shape[1:] or src_cache.dtype != dst_cache.dtype:
        raise ValueError(
            f"Blocks differ: source {tuple(src_cache.shape[1:])} {src_cache.dtype}, "
            f"destination {tuple(dst_cache.shape[1:])} {dst_cache.dtype}."
        )
    check_pairs(pairs, len(src_cache), len(dst_cache))
    for src, dst, length in runs_of(pairs):
        dst_cache[dst : dst + length].copy_(src_cache[src : src + length], non_blocking=True)


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `src` to block `dst` within a cache, all layers, for each pair.

    Each source is read as it was before the call, even if it is also a destination: one list may
    copy a block several times, move a block and reuse its place, or exchange two blocks.
    Destinations may not repeat.
    """
    check_pairs(pairs, len(cache), len(cache))
    sources = {src for src, _ in pairs}
    if sources.isdisjoint(dst for _, dst in pairs):
        for src, dst, length in runs_of(pairs):
            cache[dst : dst + length].copy_(cache[src : src + length])
        return
    src_ids, dst_ids = torch.tensor(pairs, device=cache.device).unbind(1)
    cache.index_copy_(0, dst_ids, cache.index_select(0, src_ids))


def check_pairs(pairs: Sequence[tuple[int, int]], num_src: int, num_dst: int) -> None:
    """Raise ValueError if a block is outside of its cache, or a destination repeats."""
    destinations = {dst for _, dst in pairs}
    if len(destinations) != len(pairs):
        raise ValueError(f"A destination block is repeated in {list(pairs)}.")
    for src, dst in pairs:
        if not (0 <= src < num_src and 0 <= dst < num_dst):
            raise ValueError(
                f"Pair ({src}, {dst}) is outside of caches of {num_src} and {num_dst} blocks."
            )


def runs_of(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (first source, first destination, length) of each run of adjacent pairs."""
    runs: list[tuple[int, int, int]] = []
    for src, dst in pairs:
        first_src, first_dst, length = runs[-1] if runs else (src, dst, 0)
        if runs and (src, dst) == (first_src + length, first_dst + length):
            runs[-1] = first_src, first_dst, length + 1
        else:
            runs.append((src, dst, 1))
    return runs
