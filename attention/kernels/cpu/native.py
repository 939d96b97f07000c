"""Compiles the kernels in C for this machine on first use, and loads them.

The compiled library is kept in the user's cache directory, so that only the first start takes the
second or two; if another user could change what is there, each start compiles. Without a C
compiler, callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from attention.kernels.cpu.private_folder import (
    new_private_folder,
    open_private_file,
    private_folder,
)

__all__ = ["load_kernels"]

logger = logging.getLogger(__name__)

_FLAGS = (
    "-O3",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp",
    # Sums may be reassociated, but infinities and NaN are honored.
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-ffp-contract=fast",
)
_COMPILE_TIMEOUT_S = 60.0


def load_kernels(source: Path) -> ctypes.CDLL | None:
    """Return the library of a C source, compiled if needed, or None if that fails."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.system() != "Linux":
        logger.warning("No C compiler found; %s falls back to a slower path.", source.stem)
        return None
    options = [*_FLAGS, "-Wl,--as-needed", *_openmp_library()]
    try:
        name = f"{source.stem}-{_fingerprint(source, [compiler, *options])}.so"
        # Libraries follow what uses them.
        return _loaded([compiler, str(source), *options], name)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "Could not compile %s; falling back to a slower path: %s", source.name, error
        )
        return None


def _loaded(command: list[str], name: str) -> ctypes.CDLL:
    """Return the library that a command compiles, from the cache if it is there."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(private_folder(_cache_folder()))
        except OSError as error:
            logger.warning("Compiling %s at each start, as it cannot be cached: %s", name, error)
            folder = stack.enter_context(new_private_folder())
        library = open_private_file(name, folder)
        if library is None:
            _compile(command, name, folder)
            library = open_private_file(name, folder)
    if library is None:
        raise FileNotFoundError(f"{name} has disappeared")
    # Its descriptor stays open: the loader takes paths that are equal for the same library.
    return ctypes.CDLL(f"/proc/self/fd/{library}")


def _compile(command: list[str], name: str, folder: int) -> None:
    made = f"{secrets.token_hex(8)}.tmp"
    try:
        subprocess.run(
            [*command, "-o", f"/proc/{os.getpid()}/fd/{folder}/{made}"],
            check=True,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        # Whatever the user's mask is.
        os.chmod(made, 0o700, dir_fd=folder)
        # Processes that compile at the same time replace it by the same file.
        os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(made, dir_fd=folder)
        raise


def _openmp_library() -> list[str]:
    # Torch's own OpenMP, so that two thread pools do not compete.
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(path) for path in found[:1]]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pagedray" / "kernels"


def _fingerprint(source: Path, options: list[str]) -> str:
    # Not of the path, so that several installations share the library.
    digest = hashlib.sha256(repr(options).encode())
    for part in sorted((source, *source.parent.glob("*.h"))):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    digest.update(_cpu_features())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    # Machines with different instruction sets may share a home directory.
    for line in Path("/proc/cpuinfo").read_bytes().splitlines():
        if line.startswith((b"flags", b"Features")):
            return line
    return platform.machine().encode()
