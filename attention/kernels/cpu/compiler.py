"""The C compiler of this machine, and how it compiles the kernels."""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.sealed_file import seal_file

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CompilationError",
    "compile_library",
    "compiler_options",
    "find_compiler",
    "source_digest",
]

_FLAGS = (
    "-O3",
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
_TIMEOUT_S = 60.0
_MAX_SHOWN = 300
"""Characters of a compiler's error in a message."""


class CompilationError(Exception):
    """A compiler has failed; the message is its own."""


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None if there is none, or not Linux."""
    if platform.system() != "Linux":
        return None
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiler_options(architecture: Sequence[str]) -> list[str]:
    """Return the compiler options behind the source, given the options that name the CPU."""
    return [*architecture, *_FLAGS, "-Wl,--as-needed", *_openmp_library()]


def source_digest(source: Path, options: Sequence[str], cpu: bytes) -> str:
    """Return a name for the library that a compiler makes from a source and its headers."""
    # The path is left out, so that several installations share the library.
    digest = hashlib.sha256(repr(list(options)).encode())
    for part in sorted((source, *source.parent.glob("*.h"))):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    digest.update(cpu)
    return digest.hexdigest()[:16]


def compile_library(command: Sequence[str], name: str, folder: int, *, mode: int) -> None:
    """Write the library that a command compiles into a folder, given by its descriptor.

    Raises OSError, which is a TimeoutError if the compiler hangs, and CompilationError.
    """
    made = f"{secrets.token_hex(8)}.tmp"
    place = f"/proc/{os.getpid()}/fd/{folder}"
    try:
        done = subprocess.run(
            [*command, "-o", f"{place}/{made}"],
            check=False,
            capture_output=True,
            timeout=_TIMEOUT_S,
            # For temporary files, which others could replace in a /tmp without the sticky bit.
            env={**os.environ, "TMPDIR": place},
        )
        if done.returncode:
            raise CompilationError(_failure(command[0], done.returncode, done.stderr))
        seal_file(Path(place, made))
        # Regardless of the umask.
        os.chmod(made, mode, dir_fd=folder)
        # Processes that compile at the same time replace it by the same file.
        os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException as error:
        with suppress(FileNotFoundError):
            os.unlink(made, dir_fd=folder)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{command[0]} did not end within {_TIMEOUT_S:g} s") from None
        raise


def _failure(compiler: str, code: int, errors: bytes) -> str:
    """Return the first error of a compiler that has failed, in one line."""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    shown = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
    how = f"{compiler} was ended by signal {-code}" if code < 0 else f"{compiler} failed"
    return f"{how}: {shown[:_MAX_SHOWN]}" if shown else how


def _openmp_library() -> list[str]:
    # Torch's own OpenMP, so that two thread pools do not compete.
    root = Path(torch.__file__).parent
    found = [*root.glob("lib/libgomp*.so*"), *root.parent.glob("torch.libs/libgomp*.so*")]
    return [str(path) for path in found[:1]]
