"""Array types of the sampler, and uploads of small arrays to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["FloatArray", "IntArray", "select_rows", "upload"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def upload(array: NDArray[Any], device: torch.device) -> Tensor:  # Any: every element type
    """Return the array as a tensor on `device`; does not synchronize with it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    # A copy from pageable memory would synchronize with the device.
    return tensor.pin_memory().to(device, non_blocking=True)


def select_rows(matrix: Tensor, indices: IntArray) -> Tensor:
    """Return these rows of the matrix, or the matrix itself for all rows in order."""
    if len(indices) == len(matrix):
        return matrix
    return matrix.index_select(0, upload(indices, matrix.device))
