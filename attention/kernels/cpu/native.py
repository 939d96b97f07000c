"""Compiles the kernels in C for this machine on first use, and loads them.

The compiled library is kept in the user's cache directory, so that only the first start takes the
second or two. Without a C compiler, callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

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
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "Could not compile %s; falling back to a slower path: %s", source.name, error
        )
        return None


def _compiled(source: Path, compiler: str) -> Path:
    openmp = _openmp_library()
    command = [compiler, *_FLAGS, str(source), "-Wl,--as-needed", *openmp]
    target = _cache_folder() / f"{source.stem}-{_fingerprint(source, command)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        subprocess.run(
            [*command, "-o", str(made)],
            check=True,
            capture_output=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        # Processes that compile at the same time replace it by the same file.
        made.replace(target)
    return target


def _openmp_library() -> list[str]:
    # Torch's own OpenMP, so that two thread pools do not compete.
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(path) for path in found[:1]]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "pagedray" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} is writable by other users")
    return folder


def _fingerprint(source: Path, command: list[str]) -> str:
    digest = hashlib.sha256(repr(command).encode())
    for part in sorted((source, *source.parent.glob("*.h"))):
        digest.update(part.read_bytes())
    digest.update(_cpu_features())
    return digest.hexdigest()[:16]


def _cpu_features() -> bytes:
    # Machines with different instruction sets may share a home directory.
    for line in Path("/proc/cpuinfo").read_bytes().splitlines():
        if line.startswith((b"flags", b"Features")):
            return line
    return platform.machine().encode()
