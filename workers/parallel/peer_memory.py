"""Memory of a GPU that other processes on the node read and write, through CUDA's IPC handles.

A process may open the memory of a GPU that it cannot see: Ray shows each rank only its own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PeerMemory", "PeerMemoryError"]

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class PeerMemoryError(Exception):
    """CUDA cannot share memory between these processes or devices."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


class PeerMemory:
    """Memory of this process's current device, and that of other ranks as this process sees it."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate memory. Raises PeerMemoryError."""
        self._num_bytes = num_bytes
        self._runtime = _load_runtime()
        address = ctypes.c_void_p()
        # An allocation of torch may be a part of a larger one, and a handle is for all of it.
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        assert address.value is not None
        self.address: int = address.value
        self._opened: list[int] = []

    def handle(self) -> bytes:
        """Return what other processes open this memory by. Raises PeerMemoryError."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self.address))
        return bytes(handle)

    def fill(self, byte: int) -> None:
        """Set every byte of this memory. Raises PeerMemoryError."""
        address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self._num_bytes)
        self._call("cudaMemset", address, ctypes.c_int(byte), size)
        self._call("cudaDeviceSynchronize")

    def open_peers(self, handles: Sequence[bytes | None]) -> list[int]:
        """Return the addresses of other ranks' memory; None stands for this one.

        Raises PeerMemoryError, after which those that were opened are closed again.
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
        """Forget the memory of other ranks, which no kernel uses any more."""
        while self._opened:
            self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(self._opened.pop()))

    def close(self) -> None:
        """Free this memory, and forget that of other ranks."""
        self.close_peers()
        self._runtime.cudaFree(ctypes.c_void_p(self.address))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._runtime, name)(*arguments)
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
