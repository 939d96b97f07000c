"""Pinned host memory from which a GPU reads small arrays: buffers that are used in turn."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PinnedRing", "copy_from_host"]


class PinnedRing:
    """A ring of buffers: the host fills a buffer while the GPU still reads others."""

    def __init__(self, device: torch.device, *, num_buffers: int = 2) -> None:
        """Memory is allocated when it is needed; that of a CPU `device` is not pinned."""
        self._is_cuda = device.type == "cuda"
        self._turn = 0
        self._buffers = [torch.empty(0, dtype=torch.int64)] * num_buffers
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers

    @contextmanager
    def next_buffer(self, num_words: int) -> Iterator[torch.Tensor]:
        """Yield `num_words` int64 on the host; launch the readers of the buffer within the context.

        Waits only if the GPU has not yet run the readers of this buffer's last turn.
        """
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        if len(self._buffers[turn]) < num_words:
            capacity = 1 << (num_words - 1).bit_length()
            self._buffers[turn] = torch.empty(capacity, dtype=torch.int64, pin_memory=self._is_cuda)
        yield self._buffers[turn][:num_words]
        if self._is_cuda:
            self._events[turn] = event = event or torch.cuda.Event()
            event.record()


def copy_from_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int64 words from pinned memory, without waiting, and without a copy engine on a GPU."""
    if not target.is_cuda:
        target.copy_(source)
        return
    # Imported here so that this module can be imported without Triton.
    from attention.kernels.triton.host_words import copy_words

    copy_words(target, source)
