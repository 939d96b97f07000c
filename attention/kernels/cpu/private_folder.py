"""A folder that no other user can change, reached by descriptors only."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["new_private_folder", "open_private_file", "private_folder"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Yield a descriptor of a folder of this user, which is created if it is missing.

    Raises PermissionError if another user could write to it or replace it, and OSError.
    """
    # The real path has no links, and no other user can add one once its parents are checked.
    names = Path(os.path.realpath(path)).parts
    folder = os.open(names[0], _FOLDER)
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
        folder = os.open(path, _FOLDER)
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
        return os.open(name, _FOLDER, dir_fd=parent)
    except FileNotFoundError:
        # Another process may do so at the same time.
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        return os.open(name, _FOLDER, dir_fd=parent)


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
