"""The instruction sets that kernels are compiled for before the CPU is known."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

__all__ = ["INSTRUCTION_SETS", "InstructionSet", "has_amx", "read_cpu_features"]

_FEATURES = {"amx_bf16", "amx_tile", "avx512f"}


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """Instructions of some CPUs: their name, the compiler's options, and Linux' names of them."""

    name: str
    options: tuple[str, ...]
    features: frozenset[str]


# The levels of the System V ABI (https://gitlab.com/x86-psABIs/x86-64-ABI), in Linux' words:
# `pni` is SSE3, and `abm` has LZCNT.
_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})

_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}

_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

_AMX = frozenset({"amx_bf16", "amx_tile"})

INSTRUCTION_SETS = (
    InstructionSet(
        "x86-64-v4-amx",
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_bf16"} | _AMX,
    ),
    InstructionSet("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
    InstructionSet("x86-64-v4", ("-march=x86-64-v4",), _V4),
    InstructionSet("x86-64-v3", ("-march=x86-64-v3",), _V3),
)
"""The largest first. The kernels distinguish no others on x86-64."""


def read_cpu_features() -> bytes:
    """Return the line of /proc/cpuinfo that names the features, or the name of the machine."""
    for line in Path("/proc/cpuinfo").read_bytes().splitlines():
        if line.startswith((b"flags", b"Features")):
            return line
    return platform.machine().encode()


@cache
def has_amx() -> bool:
    """Return whether kernels can use AMX and AVX-512, and Linux lets this process use AMX."""
    features = set(read_cpu_features().decode().split())
    return features >= _FEATURES and torch.cpu._init_amx()
