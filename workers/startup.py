"""Imports the libraries of ranks; a spare process imports them before a rank dies.

A rank that starts leaves out libraries that only some models need.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagedray.config import EngineConfig

__all__ = ["begin_context", "import_libraries", "import_modules", "uncollected_imports"]

_MODULES = ("workers.embedding_worker", "workers.parallel.process_group")
# Modules that are imported only when a model needs their kernels on a GPU.
_KERNELS = ("attention.gpu.shared_kernels", "workers.sampling.device_choice")
_LIBRARIES = {"flashinfer": "attention.gpu.flashinfer_kernels"}
"""The module of ours that imports each library, by the library's name."""


def import_modules(config: EngineConfig) -> None:
    """Import the modules of a rank that every model needs on its device.

    Uses no device.
    """
    for name in _MODULES:
        import_module(name)
    if config.parallel.device == "cuda":
        for name in _KERNELS:
            import_module(name)
        # Triton is imported only where it compiles.
        from triton.runtime.cache import triton_key

        from attention.kernels.triton.kernel_launcher import fix_kernel_keys

        # Before the first kernel, Triton hashes its own libraries, and keeps the result: 0.4 s, in
        # which weights are loaded.
        threading.Thread(target=triton_key, name="pagedray-triton-key", daemon=True).start()
        fix_kernel_keys()


def import_libraries(config: EngineConfig) -> None:
    """Import the modules of a rank, with the libraries that some models need on its device.

    Uses no device.
    """
    import_modules(config)
    if config.parallel.device == "cuda":
        for library, module in _LIBRARIES.items():
            if find_spec(library):
                import_module(module)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Disable garbage collection during imports, and exempt all objects that exist afterwards.

    Modules have several hundred thousand objects, which each collection would traverse. Only for a
    process that ends with its rank.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
