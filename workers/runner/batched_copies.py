"""Many copies in one call of the CUDA driver (`cuMemcpyBatchAsync`, CUDA 12.8).

A call for each block would keep the thread that launches steps busy for longer than the copies
take. https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BatchedCopies", "find_batched_copies"]

_DRIVER = "libcuda.so.1"
_VERSION = 12080
"""Its signature is that of this version of CUDA, also in later drivers."""
_IN_STREAM_ORDER = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read after earlier work on the stream."""


class _Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("src_access_order", ctypes.c_uint),
        ("src_location_hint", _Location),
        ("dst_location_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_Function = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # destinations, uint64 [count]
    ctypes.c_void_p,  # sources, uint64 [count]
    ctypes.c_void_p,  # sizes, size_t [count]
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attributes [num_attributes]
    ctypes.c_void_p,  # first copy that each attribute holds for, size_t [num_attributes]
    ctypes.c_size_t,  # num_attributes
    ctypes.c_void_p,  # index of a copy that is invalid, size_t
    ctypes.c_void_p,  # stream
)


class BatchedCopies:
    """Copies many blocks by the function of the driver."""

    def __init__(self, address: int) -> None:
        self._function = _Function(address)
        self._attributes = _Attributes(src_access_order=_IN_STREAM_ORDER)
        self._first = ctypes.c_size_t(0)

    def launch(
        self,
        *,
        sources: npt.NDArray[np.uint64],
        targets: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        """Copy `sizes[i]` bytes between addresses, in any order, on the current stream.

        Host memory must be pinned. Raises RuntimeError if the driver fails.
        """
        arrays = targets, sources, sizes
        assert all(one.dtype == np.uint64 and one.flags.c_contiguous for one in arrays)
        assert len(sources) == len(targets) == len(sizes)
        invalid = ctypes.c_size_t(0)
        result = self._function(
            *(one.ctypes.data for one in arrays),
            len(sources),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(invalid),
            torch.cuda.current_stream().cuda_stream,
        )
        if result:
            raise RuntimeError(f"cuMemcpyBatchAsync returned {result} at copy {invalid.value}")


def find_batched_copies() -> BatchedCopies | None:
    """Return the driver's function, or None if it has none."""
    try:
        find = ctypes.CDLL(_DRIVER).cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    find.argtypes = (
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
    )
    result = find(
        b"cuMemcpyBatchAsync",
        ctypes.addressof(address),
        _VERSION,
        0,
        ctypes.addressof(status),
    )
    return None if result or not address.value else BatchedCopies(address.value)
