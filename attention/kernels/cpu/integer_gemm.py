"""GEMM of bfloat16 with a weight of small integers on the CPU."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch.nn import functional

from attention.kernels.cpu.native import load_kernels
from attention.kernels.cpu.packed_gemm import TiledProduct

__all__ = ["IntegerGemm", "has_integer_gemm"]

# As in integer_gemm.c: columns of a tile, and numbers in a word.
_TILE = 64
_PER_WORD = {4: 8, 8: 2}
_WORDS = {4: torch.int32, 8: torch.int16}
_TILES_AT_ONCE = 16


class _Shape(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("num_rows", "in_size", "out_size", "x_stride", "group_size", "is_gated")
    )


class _Weight(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("words", "scales", "minimums", "bias"))


def has_integer_gemm() -> bool:
    """Return whether a compiler is available, without which there is no kernel."""
    return _library() is not None


class IntegerGemm(TiledProduct):
    """A weight, `[out_size, in_size]`, of integers with a scale for each group of inputs."""

    _tile = _TILE

    def __init__(
        self,
        numbers: torch.Tensor,
        scales: torch.Tensor,
        minimums: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        num_bits: Literal[4, 8],
    ) -> None:
        """`numbers` are `[out_size, in_size]`: uint8 from 0 to 15, less 8, or int8.

        `scales` are `[out_size, groups]` and stored in float16. `minimums`, `[out_size, groups]`
        float32, are added to the values of their group. Groups have a multiple of eight inputs.
        `bias` is bfloat16. `has_integer_gemm` must be true.
        """
        library = _library()
        assert library is not None
        self._kernel = library[f"integer_gemm_int{num_bits}"]
        self._kernel.argtypes = [ctypes.c_void_p] * 4
        self._kernel.restype = None
        out_size, in_size = numbers.shape
        super().__init__(out_size, in_size, torch.bfloat16)
        self._group_size = in_size // scales.shape[1]
        assert self._group_size % _PER_WORD[num_bits] == 0
        assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
        tensors = (
            _words(numbers, num_bits),
            _tiles(scales.to(torch.float16)),
            None if minimums is None else _tiles(minimums),
            bias,
        )
        # The kernel reads the memory of these tensors.
        self._tensors = tensors
        self._weight = _Weight(*(None if one is None else one.data_ptr() for one in tensors))
        self._weight_address = ctypes.addressof(self._weight)
        self.num_bytes = sum(one.nbytes for one in tensors[:3] if one is not None)
        """Bytes of the numbers, the scales and the minimums."""

    def _run(self, x: torch.Tensor, out: torch.Tensor, *, is_gated: bool) -> None:
        num_rows, in_size = x.shape
        shape = _Shape(num_rows, in_size, out.shape[1], x.stride(0), self._group_size, is_gated)
        self._kernel(ctypes.addressof(shape), x.data_ptr(), self._weight_address, out.data_ptr())


def _words(numbers: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return `[tiles, in_size / numbers of a word, _TILE]`."""
    out_size, in_size = numbers.shape
    num_tiles, per_word = -(-out_size // _TILE), _PER_WORD[num_bits]
    words = torch.empty(num_tiles, in_size // per_word, _TILE, dtype=_WORDS[num_bits])
    for first in range(0, num_tiles, _TILES_AT_ONCE):
        rows = numbers[first * _TILE : (first + _TILES_AT_ONCE) * _TILE]
        rows = functional.pad(rows, (0, 0, 0, -len(rows) % _TILE))
        rows = rows.view(-1, _TILE, in_size // per_word, per_word)
        if num_bits == 4:
            # A byte has the numbers of inputs 0 and 2, 4 and 6, 1 and 3, or 5 and 7.
            rows = rows[..., (0, 4, 1, 5)] | rows[..., (2, 6, 3, 7)] << 4
        packed = rows.contiguous().view(words.dtype).squeeze(3)
        words[first : first + _TILES_AT_ONCE] = packed.transpose(1, 2)
    return words


def _tiles(values: torch.Tensor) -> torch.Tensor:
    """Return `[out_size, groups]` as `[tiles, groups, _TILE]`, padded with zeros."""
    padded = functional.pad(values, (0, 0, 0, -len(values) % _TILE))
    return padded.view(-1, _TILE, values.shape[1]).transpose(1, 2).contiguous()


@cache
def _library() -> ctypes.CDLL | None:
    return load_kernels(Path(__file__).with_suffix(".c"))
