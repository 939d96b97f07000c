"""Launches that overlap the end of the kernel before them: programmatic dependent launch.

The programs of such a kernel may start once all programs of the preceding kernel have started.
Before they read the output of another kernel, or write anything, they wait until all preceding
kernels have ended. GPUs before Hopper do not overlap kernels.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "can_depend",
    "dependent_launch",
    "launch_options",
    "start_next_kernel",
    "wait_for_inputs",
]

_HOPPER = (9, 0)


@triton.jit
def wait_for_inputs(is_dependent: tl.constexpr, starts_next: tl.constexpr = True) -> None:
    """Wait for all preceding kernels; with `starts_next`, let the next kernel start first.

    A program must call this before it writes anything, and before it reads anything other than
    weights and data that was uploaded before the step. At least one program of each kernel must
    call this. A kernel then never ends before the preceding kernel, so waiting for one kernel means
    waiting for all, even though the next kernel starts before this kernel has waited. The next
    kernel starts when all programs of this kernel are running, so it takes no resources from them.
    """
    if is_dependent:
        if starts_next:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def start_next_kernel(is_dependent: tl.constexpr) -> None:
    """Let the next kernel start, after `wait_for_inputs` with `starts_next` false.

    The next kernel loads its first weights at once, which would delay earlier loads of this kernel.
    """
    if is_dependent:
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
