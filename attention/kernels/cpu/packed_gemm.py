"""GEMM with a packed weight on the CPU."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from typing import Self

import torch
from torch.nn import functional

from attention.kernels.cpu.instruction_set import has_amx
from attention.kernels.cpu.native import find_kernel, load_kernels

__all__ = ["PackedGemm", "TiledProduct"]

_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat"}
# Columns of a tile as packed here, and as other libraries may pack them, the most likely first.
_TILE = 32
_SOURCES = {64: "packed_gemm_64.c", 32: "packed_gemm.c"}
# With AMX, for bfloat16: oneDNN has tiles of 32 columns, too.
_AMX_TILE, _AMX_SOURCE = 32, "packed_gemm_amx.c"
# As in packed_gemm_tiles.h: elements of a row in one step of a sum, and steps of a slice, to a
# multiple of which tiles are padded with zeros.
_STEP = {torch.float32: 1, torch.bfloat16: 2}
_SLICE = 16
# The longest row of x that fits in the kernel's buffer.
_MOST_IN_SIZE = 2**18
_COMPARED_TILES = 4


class TiledProduct(ABC):
    """A weight, `[out_size, in_size]`, packed into tiles of columns.

    Every sum is taken in the same order: a row of the result depends neither on the other rows of
    the batch nor on the number of threads.
    """

    _tile: int
    """Columns of a tile."""

    def __init__(self, out_size: int, in_size: int, dtype: torch.dtype) -> None:
        """`dtype` is that of the inputs."""
        self._out_size, self._in_size = out_size, in_size
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[num_rows, out_size]` for `[num_rows, in_size]`; rows of x may be strided."""
        return self._product(x, self._out_size, is_gated=False)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return `silu(first half of the product) * second half`, `[num_rows, out_size / 2]`."""
        half = self._out_size // 2
        if half % self._tile == 0:
            return self._product(x, half, is_gated=True)
        gate, other = self(x).chunk(2, dim=1)
        return functional.silu(gate).mul_(other)

    @abstractmethod
    def _run(self, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> None:
        """Write the product, gated or not."""

    def _product(self, x: torch.Tensor, out_size: int, *, is_gated: bool) -> torch.Tensor:
        num_rows, in_size = x.shape
        assert x.dtype == self._dtype
        assert in_size == self._in_size
        assert x.stride(1) == 1
        out = x.new_empty((num_rows, out_size))
        self._run(x, out, is_gated=is_gated)
        return out


class _GemmShape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_rows", "in_size", "out_size", "x_stride", "is_gated")
    )


class PackedGemm(TiledProduct):
    """A weight, `[out_size, in_size]`, packed into tiles of columns, and its bias if any."""

    def __init__(
        self,
        kernel: ctypes._NamedFuncPointer,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        tile: int,
        out_size: int,
        in_size: int,
    ) -> None:
        """`packed` is `[num_tiles, num_steps, tile, step]`, and must not be freed before."""
        super().__init__(out_size, in_size, packed.dtype)
        self._tile = tile
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

        It is a copy, unless `overwrites` allows packing in place and the sizes are multiples of the
        tiles.
        """
        kernel = _kernel(_TILE, weight, bias)
        if kernel is None:
            return None
        out_size, in_size = weight.shape
        is_packed = overwrites and _pack_in_place(weight)
        packed = weight if is_packed else _packed(weight, _TILE)
        return cls(kernel, packed, bias, tile=_TILE, out_size=out_size, in_size=in_size)

    @classmethod
    def over(
        cls, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Self | None:
        """Return the GEMM with a weight that another library has packed, `[num_elements]`.

        None if `make` returned None, or if the library packed `weight` in another way than this
        module does. A constant weight looks the same in every layout, and also gives None.
        """
        out_size, in_size = weight.shape
        kernels = {
            tile: kernel
            for tile in _SOURCES
            if (kernel := _kernel(tile, weight, bias)) is not None
            and _is_packed(packed, weight, tile)
        }
        if len(kernels) != 1:
            return None
        ((tile, kernel),) = kernels.items()
        return cls(kernel, packed, bias, tile=tile, out_size=out_size, in_size=in_size)

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


def _kernel(
    tile: int, weight: torch.Tensor, bias: torch.Tensor | None
) -> ctypes._NamedFuncPointer | None:
    """Return the GEMM with a weight in tiles of this size, or None if it is not supported."""
    is_supported = (
        weight.device.type == "cpu"
        and weight.dtype in _SUFFIXES
        and weight.numel() > 0
        and weight.shape[1] <= _MOST_IN_SIZE
        and (bias is None or bias.is_contiguous())
        and (bias is None or (bias.dtype == weight.dtype and len(bias) == len(weight)))
    )
    if not is_supported:
        return None
    uses_amx = tile == _AMX_TILE and weight.dtype == torch.bfloat16 and has_amx()
    libraries = map(_library, [_AMX_SOURCE, _SOURCES[tile]] if uses_amx else [_SOURCES[tile]])
    kernel = find_kernel(f"packed_gemm_{_SUFFIXES[weight.dtype]}", libraries)
    if kernel is None:
        return None
    kernel.argtypes = [ctypes.c_void_p] * 5
    kernel.restype = None
    return kernel


def _pack_in_place(weight: torch.Tensor) -> bool:
    """Pack the weight where it is and return True, or change nothing."""
    kernel = getattr(_library(_SOURCES[_TILE]), "pack_tiles", None)
    out_size, in_size = weight.shape
    step = _STEP[weight.dtype]
    is_whole = out_size % _TILE == 0 and in_size % (_SLICE * step) == 0
    if kernel is None or not is_whole or not weight.is_contiguous():
        return False
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    kernel.restype = ctypes.c_int64
    return bool(kernel(weight.data_ptr(), out_size // _TILE, in_size // step))


def _packed(weight: torch.Tensor, tile: int) -> torch.Tensor:
    """Return the weight as `[num_tiles, num_steps, tile, step]`, padded with zeros."""
    step = _STEP[weight.dtype]
    out_size, in_size = weight.shape
    padded = functional.pad(weight, (0, -in_size % (_SLICE * step), 0, -out_size % tile))
    tiles = padded.reshape(-1, tile, padded.shape[1] // step, step).transpose(1, 2)
    # A weight of one tile and one step is contiguous here, and must still be copied.
    return tiles.clone(memory_format=torch.contiguous_format)


def _is_packed(packed: torch.Tensor, weight: torch.Tensor, tile: int) -> bool:
    """Return whether a weight is packed into tiles of this size, of which some are compared."""
    out_size, in_size = weight.shape
    size = _SLICE * _STEP[weight.dtype]
    num_tiles, tile_elements = -(-out_size // tile), tile * (in_size + -in_size % size)
    if packed.dtype != weight.dtype or packed.numel() != num_tiles * tile_elements:
        return False
    tiles = packed.view(num_tiles, tile_elements)
    places = {num_tiles * part // _COMPARED_TILES for part in range(_COMPARED_TILES)}
    return all(
        torch.equal(
            _bits(tiles[place]),
            _bits(_packed(weight[place * tile : (place + 1) * tile], tile).flatten()),
        )
        for place in {*places, num_tiles - 1}
    )


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of the values as integers, which compare NaN and -0.0 exactly."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


@cache
def _library(source: str) -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_name(source))
