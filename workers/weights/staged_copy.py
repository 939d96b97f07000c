"""Copies tensors from host memory to where weights are loaded."""

from __future__ import annotations

import threading

import torch

__all__ = ["StagedCopy"]


class StagedCopy(threading.local):
    """Copies to a GPU through a pinned buffer, of which every thread has one.

    A GPU reads pinned memory several times as fast as the page cache, where checkpoints are. The
    copy to the buffer is bound by the CPU, so that several threads are faster than one.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._read: torch.cuda.Event | None = None
        """Completes when the GPU has read the buffer."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` to `target`, converted to its dtype; does not wait for the GPU."""
        if target.device.type != "cuda":
            target.copy_(source)
            return
        # Events and streams are those of a thread's device.
        with torch.cuda.device(target.device):
            self._copy_to_gpu(target, source)

    def _copy_to_gpu(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._read is None:
            self._read = torch.cuda.Event()
        self._read.synchronize()
        size = target.numel() * target.element_size()
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        staged = self._buffer[:size].view(target.dtype).view(target.shape)
        staged.copy_(source)
        target.copy_(staged, non_blocking=True)
        self._read.record()
