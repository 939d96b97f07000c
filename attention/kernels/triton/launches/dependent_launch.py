"""Launches that overlap the end of the kernel before them: programmatic dependent launch.

The programs of such a kernel may start once all those of the kernel before it have started. Before
they read what another kernel writes, or write anything, they wait until that kernel has ended, with
all kernels before it. GPUs before Hopper start them only then.
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
    """Let the next kernel start, unless not `starts_next`, and wait for those before this one.

    A program must call this before it writes anything, or reads anything but weights and what was
    uploaded before the step (which no kernel of this kind does); it may return without only if
    others of its kernel do call it. Then a kernel ends only after the one before it, so that to
    wait for one kernel is to wait for all, although the next one starts before this one has waited.
    It starts when all programs of this one run, and so takes no place that one of them needs.
    """
    if is_dependent:
        if starts_next:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def start_next_kernel(is_dependent: tl.constexpr) -> None:
    """Let the next kernel start, in a kernel that has waited without doing so.

    The next kernel reads its first weights at once, which delays what this one reads until then.
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
