"""Memory that FlashInfer's wrappers work in: scratch that all share, and plans of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = ["PlanMemory", "SharedScratch"]

# What the library recommends; eager steps need less, graphs of large batches may need more.
_SCRATCH_BYTES = 128 << 20


class SharedScratch:
    """Scratch for sequences whose keys are split; one of a device serves all wrappers.

    They may share it because no two of them run at the same time, on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    @staticmethod
    def of(device: torch.device) -> "SharedScratch":
        """Return that of a device, newly made if nobody holds it."""
        index = torch.cuda.current_device() if device.index is None else device.index
        scratch = _scratches.get(index)
        if scratch is None:
            scratch = _scratches[index] = SharedScratch(torch.device("cuda", index))
        return scratch

    def at_least(self, num_bytes: int = 0) -> torch.Tensor:
        """Return a buffer of that size or more; whoever was given a smaller one keeps that."""
        num_bytes = max(num_bytes, _SCRATCH_BYTES)
        if num_bytes > len(self._buffer):
            # The library asks for zeros at the first use.
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer


# Graphs of many sizes are captured by builders that know nothing of one another.
_scratches: WeakValueDictionary[int, SharedScratch] = WeakValueDictionary()


class PlanMemory:
    """Pinned buffers that take turns for the plans of one wrapper.

    A plan is copied to the device behind all work that is queued there. The library writes each
    to the same place on the host, and so a plan would change before it is copied.
    """

    def __init__(self, wrapper: Any) -> None:  # Any: the library has no types
        self._wrapper = wrapper
        first = wrapper._pin_memory_int_workspace_buffer
        self._pinned = [first, torch.empty_like(first, pin_memory=True)]
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._turn = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the wrapper plan into the buffer that has not been used for longer."""
        self._turn = 1 - self._turn
        # The copy of the plan before the last one: long done, unless the host is far ahead.
        self._copied[self._turn].synchronize()
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        yield
        self._copied[self._turn].record()
