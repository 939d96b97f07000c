"""Memory of a GPU that other processes on the node read and write, through CUDA's IPC handles.

A process may open the memory of a GPU that it cannot see: Ray shows each rank only its own.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PeerMemory", "PeerMemoryError", "RowShape"]

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_COPY_BY_ADDRESSES = 4
"""cudaMemcpyDefault: CUDA infers from the addresses where they are."""


class PeerMemoryError(Exception):
    """CUDA cannot share memory between these processes or devices."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class _Part:
    """Bytes on the device, as torch takes them from other libraries."""

    def __init__(self, address: int, num_bytes: int) -> None:
        # Any: the values are of several types.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class PeerMemory:
    """Memory of this process's current device, and that of other ranks as this process sees it."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate memory. Raises PeerMemoryError."""
        self._num_bytes = num_bytes
        self._runtime = _load_runtime()
        self._copy = self._runtime.cudaMemcpyAsync
        self._copy.argtypes = (
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_void_p,
        )
        address = ctypes.c_void_p()
        # An allocation of torch may be a part of a larger allocation, and a handle opens all of it.
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        self.address: int = address.value
        self._opened: list[int] = []

    def handle(self) -> bytes:
        """Return the handle by which other processes open this memory. Raises PeerMemoryError."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.address))
        return bytes(handle)

    def copy(self, target: int, source: int, num_bytes: int, stream: torch.cuda.Stream) -> None:
        """Copy bytes of this device to an address of a peer's memory, by a copy engine.

        Raises PeerMemoryError.
        """
        code = self._copy(target, source, num_bytes, _COPY_BY_ADDRESSES, stream.cuda_stream)
        self._check("cudaMemcpyAsync", code)

    def view(self, first_byte: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a part of this process's memory as a tensor, which must not outlive it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert first_byte + num_bytes <= self._num_bytes
        part = _Part(self.address + first_byte, num_bytes)
        return torch.as_tensor(part, device="cuda").view(dtype).view(shape)

    def fill(self, byte: int) -> None:
        """Set every byte of this memory. Raises PeerMemoryError."""
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self._num_bytes)
        self._call("cudaMemset", address, ctypes.c_int(byte), size)
        self._call("cudaDeviceSynchronize")

    def open_peers(self, handles: Sequence[bytes | None]) -> list[int]:
        """Return the addresses of other ranks' memory; None stands for this rank.

        Raises PeerMemoryError after closing the memory opened so far.
        """
        addresses = []
        try:
            for handle in handles:
                if handle is None:
                    addresses.append(self.address)
                    continue
                address = ctypes.c_void_p()
                self._call(
                    "cudaIpcOpenMemHandle",
                    ctypes.byref(address),
                    _Handle.from_buffer_copy(handle),
                    ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
                )
                assert address.value is not None
                self._opened.append(address.value)
                addresses.append(address.value)
        except PeerMemoryError:
            self.close_peers()
            raise
        return addresses

    def close_peers(self) -> None:
        """Forget the memory of other ranks, which no kernel uses anymore."""
        while self._opened:
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(self._opened.pop()))

    def close(self) -> None:
        """Free this memory, and forget that of other ranks."""
        self.close_peers()
        self._runtime.cudaFree(ctypes.c_void_p(self.address))

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._runtime, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != 0:
            # Otherwise torch would report it as the error of its next call.
            self._runtime.cudaGetLastError()
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            reason = self._runtime.cudaGetErrorString(code).decode()
            raise PeerMemoryError(f"{name}: {reason}")


def _load_runtime() -> ctypes.CDLL:
    assert torch.version.cuda is not None
    name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}"
    try:
        # Torch has loaded it.
        return ctypes.CDLL(name)
    except OSError as error:
        raise PeerMemoryError(str(error)) from error


@dataclass(frozen=True, slots=True)
class RowShape:
    """The common properties of rows."""

    width: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row."""
        return self.width * self.dtype.itemsize
