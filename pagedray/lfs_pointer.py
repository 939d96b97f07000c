"""Detects files of a checkpoint that Git cloned without their content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_is_no_pointer"]

_BEGINNING = b"version https://git-lfs"


def check_is_no_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is a pointer of Git LFS instead of its content."""
    with path.open("rb") as file:
        if file.read(len(_BEGINNING)) == _BEGINNING:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in "
                f"{path.parent}."
            )
