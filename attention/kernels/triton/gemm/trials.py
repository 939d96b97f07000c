"""Tries kernels of products, before layers choose between kernels and their replacements.

Kernels that load through descriptors or contain assembly depend on the releases of Triton and of
the driver more than others do. If such a kernel does not compile, layers multiply without it.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch

from attention.kernels.arguments import DeferredRMSNorm, QuantizedRows, Rotary
from attention.kernels.triton.gemm.fp8_tiles import Fp8Tiling, fp8_tiles_gemm, new_arrivals
from attention.kernels.triton.gemm.gemv import GemvTuning, gemv
from attention.kernels.triton.gemm.normed_gemv import normed_gemv
from attention.kernels.triton.gemm.persistent_gated import persistent_gated
from attention.kernels.triton.gemm.persistent_rotated import ROTATED_HEAD_SIZE, persistent_rotated
from attention.kernels.triton.gemm.skinny import SkinnyGemmTuning, skinny_gemm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TRIALS", "failed_trials"]

logger = logging.getLogger(__name__)

_SIZE = 128


def _ones(num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(num_rows, _SIZE, dtype=torch.bfloat16, device=device)


def _try_gemv(device: torch.device) -> None:
    gemv(_ones(1, device), _ones(16, device), None, GemvTuning(tile_columns=4))


def _try_normed_gemv(device: torch.device) -> None:
    row = DeferredRMSNorm(_ones(1, device), _ones(1, device)[0], 1e-5)
    normed_gemv(row, _ones(16, device), None, GemvTuning(tile_columns=4))


def _try_skinny(device: torch.device) -> None:
    tuning = SkinnyGemmTuning(tile_columns=32, tile_depth=64, num_warps=4, num_stages=3)
    skinny_gemm(_ones(2, device), _ones(32, device), None, tuning)


def _try_persistent_gated(device: torch.device) -> None:
    persistent_gated(_ones(1, device), _ones(16, device), "silu", 1)


def _try_persistent_rotated(device: torch.device) -> None:
    positions = torch.zeros(1, dtype=torch.int64, device=device)
    rotary = Rotary(positions, torch.ones(1, ROTATED_HEAD_SIZE, device=device))
    out = torch.empty(1, 16, dtype=torch.bfloat16, device=device)
    persistent_rotated(_ones(1, device), _ones(16, device), rotary, 0, out, 1)


def _try_fp8_tiles(device: torch.device) -> None:
    values, scales = _ones(16, device).to(torch.float8_e4m3fn), torch.ones(16, 1, device=device)
    rows = QuantizedRows(values, scales, torch.bfloat16)
    tiling = Fp8Tiling(tile_rows=32, tile_depth=64, num_stages=3, num_parts=2)
    fp8_tiles_gemm(rows, values, scales, tiling, new_arrivals(16, device))


TRIALS: Mapping[str, Callable[[torch.device], None]] = {
    "gemv": _try_gemv,
    "normed_gemv": _try_normed_gemv,
    "skinny": _try_skinny,
    "persistent_gated": _try_persistent_gated,
    "persistent_rotated": _try_persistent_rotated,
    "fp8_tiles": _try_fp8_tiles,
}
"""By module: compiles and launches its kernel, with small matrices, or raises."""


@cache
def failed_trials(device: torch.device) -> frozenset[str]:
    """Return the modules of `TRIALS` with kernels that do not compile; log each name once."""
    # Tried at the same time, since a kernel that is not on disk takes seconds to compile. On a CPU,
    # Triton interprets one kernel at a time.
    num_threads = len(TRIALS) if device.type == "cuda" else 1
    with ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-trial") as threads:
        errors = list(threads.map(lambda trial: _error_of(trial, device), TRIALS.values()))
    for name, error in zip(TRIALS, errors, strict=True):
        if error is not None:
            logger.warning(
                "The kernel of %s.py does not compile; another, which is slower, takes its place: "
                "%s",
                name,
                next(iter(str(error).splitlines()), type(error).__name__),
            )
    return frozenset(name for name, error in zip(TRIALS, errors, strict=True) if error is not None)


def _error_of(trial: Callable[[torch.device], None], device: torch.device) -> Exception | None:
    # Threads begin with the first device.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    try:
        with current:
            trial(device)
    # Compilers raise errors of many types. If the device has failed, the next launch raises.
    except Exception as error:
        # Another attempt may find memory, and must then use the same kernels as other ranks.
        if "out of memory" in str(error):
            raise
        return error
    return None
