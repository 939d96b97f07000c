"""Loads the kernels in C, prebuilt or compiled for this machine.

The compiled libraries are kept in the user's cache directory, so that only the first start takes
the seconds for each. If another user could change the directory, or it cannot be written or loaded
from, each start compiles. Without a C compiler, callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.cpu.instruction_set import (
    INSTRUCTION_SETS,
    InstructionSet,
    read_cpu_features,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


__all__ = [
    "build_libraries",
    "find_compiler",
    "find_kernel",
    "find_library",
    "load_kernels",
    "seal_file",
]

logger = logging.getLogger(__name__)

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
_FOLDER = "prebuilt"
_SIZE = hashlib.sha256().digest_size

_PRIVATE_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


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


def find_library(source: Path) -> Path | None:
    """Return the library of a source with the most instructions of this CPU, or None."""
    if not (folder := source.parent / _FOLDER).is_dir():
        return None
    features = frozenset(read_cpu_features().decode().split())
    names = (_name(source, one) for one in INSTRUCTION_SETS if one.features <= features)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def build_libraries(sources: Path) -> int:
    """Compile all C sources of a folder for each instruction set, and return how many.

    Raises the errors of `compile_library`.
    """
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    if platform.machine() != "x86_64":
        return 0
    place = sources / _FOLDER
    place.mkdir(exist_ok=True)
    # Regardless of the umask, as for the libraries.
    place.chmod(0o755)
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = [
                pool.submit(
                    compile_library,
                    [compiler, str(source), *compiler_options(one.options)],
                    _name(source, one),
                    folder,
                    mode=0o755,
                )
                for one in INSTRUCTION_SETS
                for source in sources.glob("*.c")
            ]
        for one in made:
            one.result()
    finally:
        os.close(folder)
    return len(made)


def _name(source: Path, instruction_set: InstructionSet) -> str:
    # The digest of the current source, so that a library of another version is not found.
    digest = source_digest(source, compiler_options(instruction_set.options), b"")
    return f"{source.stem}-{instruction_set.name}-{digest}.so"


def seal_file(path: Path) -> None:
    """Append the digest; the loader of libraries ignores it. Raises OSError."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(digest)


def is_sealed(file: int) -> bool:
    """Return whether an open file is as it was sealed. Raises OSError."""
    content = os.pread(file, os.fstat(file).st_size, 0)
    return hashlib.sha256(content[:-_SIZE]).digest() == content[-_SIZE:]


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder of this user, which is created if it is missing.

    Raises PermissionError if another user could write to it or replace it, and OSError.
    """
    # The real path has no links, and no other user can add one once its parents are checked.
    names = Path(os.path.realpath(path)).parts
    folder = os.open(names[0], _PRIVATE_FOLDER)
    try:
        for position, name in enumerate(names[1:], start=1):
            _check_parent(folder, names[:position])
            parent, folder = folder, _opened(name, folder)
            os.close(parent)
        _check_private(folder, str(Path(*names)))
        yield folder
    finally:
        os.close(folder)


@contextmanager
def new_private_folder() -> Iterator[int]:
    """Yield a descriptor of an empty folder, which is removed afterwards. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="pagedray-") as path:
        folder = os.open(path, _PRIVATE_FOLDER)
        try:
            _check_private(folder, path)
            yield folder
        finally:
            os.close(folder)


def open_private_file(name: str, folder: int) -> int | None:
    """Return a descriptor of a file of this user in a folder, or None if there is none.

    A file that others could write to, or a link, is none. Raises OSError.
    """
    try:
        file = os.open(name, _FILE, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return None
        raise
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and _is_private(status):
        return file
    os.close(file)
    return None


def _opened(name: str, parent: int) -> int:
    try:
        return os.open(name, _PRIVATE_FOLDER, dir_fd=parent)
    except FileNotFoundError:
        # Another process may do so at the same time.
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, _PRIVATE_FOLDER, dir_fd=parent)


def _check_private(folder: int, name: str) -> None:
    if not _is_private(os.fstat(folder)):
        raise PermissionError(f"other users can write to {name}")


def _check_parent(folder: int, names: tuple[str, ...]) -> None:
    status = os.fstat(folder)
    # In a sticky folder such as /tmp, other users cannot rename our files.
    is_writable = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
    if is_writable or status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"other users can replace folders in {Path(*names)}")


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


if __name__ == "__main__":
    print(f"Compiled {build_libraries(Path(__file__).parent)} libraries.", file=sys.stderr)
