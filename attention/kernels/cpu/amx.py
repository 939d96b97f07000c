"""AMX, the matrix unit of some Intel CPUs."""

from __future__ import annotations

from functools import cache

import torch

from attention.kernels.cpu.instruction_set import read_cpu_features

__all__ = ["has_amx"]

_FEATURES = {b"amx_bf16", b"amx_tile"}


@cache
def has_amx() -> bool:
    """Return whether kernels can use AMX: the CPU has it, and Linux lets this process use it."""
    return set(read_cpu_features().split()) >= _FEATURES and torch.cpu._init_amx()
