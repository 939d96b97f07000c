"""Checks whether a checkpoint has a file, and raises an error if that is unknown.

Since Python 3.14, `Path.is_file` returns False for every error: without permission, or on a file
system that fails, a file would seem to be absent and its settings would be ignored. The same holds
for links of the Hugging Face cache that were copied without the files behind them.
"""

from __future__ import annotations

import errno
import stat
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_is_no_pointer", "has_file", "has_folder", "has_path"]

_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP))

_BEGINNING = b"version https://git-lfs"


def has_file(path: Path) -> bool:
    """Return whether there is a file.

    Raises CheckpointError if it cannot be read, or is a folder or anything else.
    """
    mode = _mode(path)
    if mode and not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a file.")
    return mode != 0


def has_folder(path: Path) -> bool:
    """Return whether a path is that of a folder. Raises CheckpointError if it cannot be read."""
    return stat.S_ISDIR(_mode(path))


def has_path(path: Path) -> bool:
    """Return whether anything has a path. Raises CheckpointError if it cannot be read."""
    return _mode(path) != 0


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        if not path.is_symlink():
            return 0
        raise CheckpointError(
            f"{path} is a link to {path.readlink()}, which does not exist."
        ) from None


def check_is_no_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is a pointer of Git LFS instead of its content."""
    with path.open("rb") as file:
        if file.read(len(_BEGINNING)) == _BEGINNING:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in "
                f"{path.parent}."
            )
