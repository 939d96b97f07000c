"""Creates a GPU's context while modules are imported."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["begin_context"]


def begin_context(device_index: int) -> None:
    """Begin to create the context of a visible GPU, which torch then finds; returns at once.

    The driver takes about 0.4 s for it, without the GIL. If it fails, torch fails as
    well, and says why.
    """
    threading.Thread(
        target=_create_context, args=(device_index,), name="pagedray-context", daemon=True
    ).start()


def _create_context(device_index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), device_index):
        # The runtime uses the same context of the device.
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
