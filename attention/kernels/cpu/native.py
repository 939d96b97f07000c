"""Loads the kernels in C, prebuilt or compiled for this machine.

The compiled libraries are kept in the user's cache directory, so that only the first start takes
the seconds for each. If another user could change the directory, or it cannot be written or loaded
from, each start compiles. Without a C compiler, callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from attention.kernels.cpu.compiler import (
    CompilationError,
    compile_library,
    compiler_options,
    find_compiler,
    source_digest,
)
from attention.kernels.cpu.instruction_set import read_cpu_features
from attention.kernels.cpu.prebuilt import find_library
from attention.kernels.cpu.private_folder import (
    new_private_folder,
    open_private_file,
    private_folder,
)
from attention.kernels.cpu.sealed_file import is_sealed

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["find_kernel", "load_kernels"]

logger = logging.getLogger(__name__)


def load_kernels(source: Path) -> ctypes.CDLL | None:
    """Return the library of a C source, compiled if needed, or None if that fails."""
    try:
        if (library := find_library(source)) is not None:
            return ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning("Could not load the library that came with %s: %s", source.name, error)
    compiler = find_compiler()
    if compiler is None:
        logger.warning("No C compiler found; %s falls back to a slower path.", source.stem)
        return None
    options = compiler_options(["-march=native"])
    try:
        # Machines with different instruction sets may share a home directory.
        digest = source_digest(source, [compiler, *options], read_cpu_features())
        # Libraries follow the objects that use them.
        return _loaded([compiler, str(source), *options], f"{source.stem}-{digest}.so")
    except (OSError, CompilationError) as error:
        logger.warning(
            "Could not compile %s; falling back to a slower path: %s", source.name, error
        )
        return None


def find_kernel(
    name: str, libraries: Iterable[ctypes.CDLL | None]
) -> ctypes._NamedFuncPointer | None:
    """Return the first kernel of this name, or None.

    A library is empty if the compiler does not know the instructions that its kernels need.
    """
    found = (getattr(library, name, None) for library in libraries)
    return next((kernel for kernel in found if kernel is not None), None)


def _loaded(command: list[str], name: str) -> ctypes.CDLL:
    """Return the library that a command compiles, from the cache if it is there."""
    try:
        with private_folder(_cache_folder()) as folder:
            return _loaded_from(folder, command, name)
    except TimeoutError:
        # It would hang again.
        raise
    # A compiler also fails if the disk of the folder is full.
    except (OSError, CompilationError) as error:
        reason = error
    with new_private_folder() as folder:
        library = _loaded_from(folder, command, name)
    logger.warning("Compiling %s at each start, as it cannot be cached: %s", name, reason)
    return library


def _loaded_from(folder: int, command: list[str], name: str) -> ctypes.CDLL:
    """Return the library, compiled unless it is in the folder.

    Raises the errors of `compile_library`.
    """
    library = open_private_file(name, folder)
    if library is not None and not is_sealed(library):
        logger.warning("Compiling %s again, as the cached file is damaged.", name)
        os.close(library)
        library = None
    if library is None:
        compile_library(command, name, folder, mode=0o700)
        library = open_private_file(name, folder)
    if library is None:
        raise FileNotFoundError(f"{name} has disappeared")
    # Its descriptor stays open: the loader takes paths that are equal for the same library.
    return ctypes.CDLL(f"/proc/self/fd/{library}")


def _cache_folder() -> Path:
    """Return the folder of the compiled libraries. Raises OSError if the user has no home."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise FileNotFoundError("the user has no home directory") from None
    return Path(root) / "pagedray" / "kernels"
