"""Uploads of small arrays that every step needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attention.gpu.batch import PinnedRing, copy_from_host

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Uploader"]

_NUM_BUFFERS = 32
"""More than the uploads of two steps: the host may be one step ahead of the device."""
_WORD_BYTES = 8


class Uploader:
    """Uploads arrays to one device, without waiting for it or for copies of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = PinnedRing(device, num_buffers=_NUM_BUFFERS)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:  # Any: element types of 8 bytes
        """Return an array of int64 or float64 as a tensor of its shape on the device."""
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array)
        assert array.itemsize == _WORD_BYTES
        if self.device.type == "cpu":
            return tensor
        uploaded = torch.empty(array.size, dtype=torch.int64, device=self.device)
        with self._ring.next_buffer(array.size) as words:
            words.numpy()[:] = array.reshape(-1).view(np.int64)
            copy_from_host(uploaded, words)
        return uploaded.view(tensor.dtype).view(array.shape)
