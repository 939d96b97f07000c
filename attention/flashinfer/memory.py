"""The working memory of FlashInfer's wrappers: a shared scratch buffer, and plans of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = ["PlanMemory", "SharedScratch"]

# The library's recommendation. Eager steps need less, graphs of large batches may need more.
_SCRATCH_BYTES = 128 << 20


class SharedScratch:
    """Scratch for sequences with split keys, shared by all wrappers of a device.

    Wrappers run on one stream, one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def for_device(device: torch.device) -> "SharedScratch":
        """Return the scratch of a device; create it if none is alive."""
        index = torch.cuda.current_device() if device.index is None else device.index
        scratch = _scratches.get(index)
        if scratch is None:
            scratch = _scratches[index] = SharedScratch(torch.device("cuda", index))
        return scratch

    def at_least(self, num_bytes: int = 0) -> torch.Tensor:
        """Return a buffer of that size or more; buffers returned earlier stay valid."""
        num_bytes = max(num_bytes, _SCRATCH_BYTES)
        if num_bytes > len(self._buffer):
            # The library expects zeros on first use.
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer


# Shared by builders that do not know each other, one builder per captured batch size.
_scratches: WeakValueDictionary[int, SharedScratch] = WeakValueDictionary()


class PlanMemory:
    """Two alternating pinned buffers for the plans of one wrapper.

    A plan is copied to the device after all work that is queued there. The library writes every
    plan to the same host buffer, and would overwrite it before it is copied.
    """

    def __init__(self, wrapper: Any) -> None:  # Any: the library has no types
        self._wrapper = wrapper
        first = wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, torch.empty_like(first, pin_memory=True)]
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the wrapper plan into the buffer that the last plan did not use."""
        self._turn = 1 - self._turn
        # Waits only if the host is two plans ahead of the GPU.
        self._copied[self._turn].synchronize()
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        yield
        self._copied[self._turn].record()
