"""AMX, the matrix unit of some Intel CPUs."""

from __future__ import annotations

from functools import cache

import torch

from attention.kernels.cpu.instruction_set import read_cpu_features

__all__ = ["has_amx"]

_FEATURES = {"amx_bf16", "amx_tile", "avx512f"}


@cache
def has_amx() -> bool:
    """Return whether kernels can use AMX and AVX-512, and Linux lets this process use AMX."""
    features = set(read_cpu_features().decode().split())
    return features >= _FEATURES and torch.cpu._init_amx()
