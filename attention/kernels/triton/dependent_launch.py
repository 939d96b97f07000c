"""Launches that overlap the end of the kernel before them: programmatic dependent launch.

The programs of such a kernel start while the last ones of the kernel before it still run. Before
they read what another kernel writes, or write anything, they wait until that kernel has ended, with
all kernels before it. GPUs before Hopper start them only then.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["can_depend", "dependent_launch", "launch_options", "wait_for_inputs"]

_HOPPER = (9, 0)


@triton.jit
def wait_for_inputs(is_dependent: tl.constexpr) -> None:
    """Wait for the kernels before this one, and let the next one start; for every program."""
    if is_dependent:
        gdc_wait()
        gdc_launch_dependents()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a launch on a device, for a kernel that calls `wait_for_inputs`."""
    return {"is_dependent": can_depend(device), **launch_options(device)}


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the options of Triton among these arguments."""
    # The interpreter, which runs kernels on the CPU, does not know the option.
    return {"launch_pdl": True} if can_depend(device) else {}


@cache
def can_depend(device: torch.device) -> bool:
    """Return whether kernels of a device can overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER
