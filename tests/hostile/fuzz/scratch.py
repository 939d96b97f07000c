"""Folders for inputs that are files."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

__all__ = ["scratch_folder"]

_MEMORY = Path("/dev/shm")


def scratch_folder() -> Path:
    """Return a folder that is removed at exit, in memory if possible."""
    place = _MEMORY if _MEMORY.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=place))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
