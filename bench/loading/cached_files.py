"""Files that are read from the disk or from the page cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = ["copy_files", "discard_files", "set_cached"]

_CAT = shutil.which("cat") or "cat"
_CP = shutil.which("cp") or "cp"


def discard_files(files: list[Path]) -> float:
    """Return the seconds in which `cat` writes the files to /dev/null."""
    started_s = time.perf_counter()
    with Path(os.devnull).open("wb") as sink:
        subprocess.run([_CAT, *files], stdout=sink, check=True)
    return time.perf_counter() - started_s


def copy_files(files: list[Path]) -> float:
    """Return the seconds in which `cp` copies the files to memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        started_s = time.perf_counter()
        subprocess.run([_CP, *files, folder], check=True)
        return time.perf_counter() - started_s


def set_cached(files: list[Path], *, is_cold: bool) -> None:
    """Drop the files from the page cache, or read them into it."""
    if not is_cold:
        discard_files(files)
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
