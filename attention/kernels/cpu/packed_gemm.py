"""GEMM with a packed weight on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from attention.kernels.cpu.native import load_kernels
from attention.kernels.cpu.tiled_product import TiledProduct

__all__ = ["PackedGemm"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# As in packed_gemm.c: columns of a tile, elements of a row in one step of a sum, and steps of a
# slice, to a multiple of which tiles are padded with zeros.
_TILE = 32
_STEP = {torch.float32: 1, torch.bfloat16: 2}
_SLICE = 16
# The longest row of x that fits in the kernel's buffer.
_MOST_IN_SIZE = 2**18


class _GemmShape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_rows", "in_size", "out_size", "x_stride", "is_gated")
    )


class PackedGemm(TiledProduct):
    """A weight, `[out_size, in_size]`, packed into tiles of columns, and its bias if any."""

    _tile = _TILE

    def __init__(
        self,
        kernel: ctypes._NamedFuncPointer,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out_size: int,
        in_size: int,
    ) -> None:
        super().__init__(out_size, in_size, packed.dtype)
        self._kernel = kernel
        self._packed = packed
        self._bias = bias
        self._packed_address = self._packed.data_ptr()
        self._bias_address = None if bias is None else bias.data_ptr()

    @classmethod
    def make(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, *, overwrites: bool = False
    ) -> Self | None:
        """Return the packed weight, or None if it is not supported or no compiler is available.

        It is a copy, unless `overwrites` allows to pack the weight where it is, if its sizes are
        those of whole tiles.
        """
        is_supported = (
            weight.device.type == "cpu"
            and weight.dtype in _SUFFIXES
            and weight.numel() > 0
            and weight.shape[1] <= _MOST_IN_SIZE
            and (bias is None or bias.is_contiguous())
            and (bias is None or (bias.dtype == weight.dtype and len(bias) == len(weight)))
        )
        library = _library() if is_supported else None
        if library is None:
            return None
        kernel = library[f"packed_gemm_{_SUFFIXES[weight.dtype]}"]
        kernel.argtypes = [ctypes.c_void_p] * 5
        kernel.restype = None
        out_size, in_size = weight.shape
        is_packed = overwrites and _pack_in_place(library, weight)
        packed = weight if is_packed else _packed(weight)
        return cls(kernel, packed, bias, out_size=out_size, in_size=in_size)

    def _run(self, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> None:
        num_rows, in_size = x.shape
        shape = _GemmShape(num_rows, in_size, out.shape[1], x.stride(0), is_gated)
        self._kernel(
            ctypes.addressof(shape),
            x.data_ptr(),
            self._packed_address,
            self._bias_address,
            out.data_ptr(),
        )


def _pack_in_place(library: ctypes.CDLL, weight: torch.Tensor) -> bool:
    """Pack the weight where it is and return True, or change nothing."""
    out_size, in_size = weight.shape
    step = _STEP[weight.dtype]
    if out_size % _TILE or in_size % (_SLICE * step) or not weight.is_contiguous():
        return False
    kernel = library.pack_tiles
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    kernel.restype = ctypes.c_int64
    return bool(kernel(weight.data_ptr(), out_size // _TILE, in_size // step))


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight as `[num_tiles, num_steps, _TILE, _STEP]`, padded with zeros."""
    step = _STEP[weight.dtype]
    out_size, in_size = weight.shape
    padded = functional.pad(weight, (0, -in_size % (_SLICE * step), 0, -out_size % _TILE))
    tiles = padded.reshape(-1, _TILE, padded.shape[1] // step, step).transpose(1, 2)
    # A weight of one tile and one step is contiguous here, and must still be copied.
    return tiles.clone(memory_format=torch.contiguous_format)


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
