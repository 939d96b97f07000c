"""The number of multiprocessors of a device, among which kernels divide their work."""

from __future__ import annotations

from functools import cache

import torch

__all__ = ["num_multiprocessors"]


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
