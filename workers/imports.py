"""Imports what a rank needs, so that a spare process has it before a rank dies."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = ["import_libraries"]

_MODULES = ("workers.worker_factory", "workers.parallel.group_factory")
# Modules that are imported only when a model needs their kernels on a GPU.
_KERNELS = ("attention.gpu.shared_kernels", "workers.sampling.triton_choice")
_LIBRARIES = {"flashinfer": "attention.flashinfer.layer_kernels"}
"""The module of ours that imports each library, by the library's name."""


def import_libraries(config: EngineConfig) -> None:
    """Import the modules of a rank, the libraries of its device included.

    Uses no device.
    """
    names = list(_MODULES)
    if config.parallel.device == "cuda":
        names += _KERNELS
        names += (module for library, module in _LIBRARIES.items() if find_spec(library))
    for name in names:
        import_module(name)
    if config.parallel.device == "cuda":
        # Triton is imported only where it compiles.
        from attention.kernels.triton.cache_keys import fix_cache_keys

        fix_cache_keys()
