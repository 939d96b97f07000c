"""Copies of blocks within a cache on a GPU."""

from collections.abc import Sequence

import torch

from attention.cache import check_pairs, runs_of
from attention.cache import copy_blocks as copy_runs

__all__ = ["copy_blocks"]


def copy_blocks(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy block `src` to block `dst` within a cache, all layers, for each pair, all at once.

    The result equals that of `attention.cache.copy_blocks`. Scattered blocks take one kernel
    launch; adjacent blocks take one copy without a kernel.
    """
    if not _can_use_kernel(cache, pairs):
        copy_runs(cache, pairs)
        return
    # Imported here so that this module can be imported without Triton.
    from attention.kernels.triton import copy_blocks as kernel

    check_pairs(pairs, len(cache), len(cache))
    # Torch does not reuse pinned memory before the copies from it are done.
    host = torch.tensor(pairs, dtype=torch.int64)
    if cache.is_cuda:
        host = host.pin_memory()
    kernel.copy_blocks(cache, host.to(cache.device, non_blocking=True))


def _can_use_kernel(cache: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> bool:
    """Return whether the kernel, which copies in any order, is correct for them and faster."""
    sources, destinations = zip(*pairs, strict=True) if pairs else ((), ())
    is_apart = len(runs_of(pairs)) > 1
    return is_apart and set(sources).isdisjoint(destinations) and cache.is_contiguous()
