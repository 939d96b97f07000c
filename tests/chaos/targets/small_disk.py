"""A small file system of its own, which a fault can fill. Only root can mount one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SmallDisk"]

_SIZE = "512m"
_PART = bytes(2**20)


class SmallDisk:
    """A tmpfs as a context manager; `path` is the folder on which it is mounted."""

    def __init__(self) -> None:
        # A short path: sockets in it have at most 107 characters.
        self.path = Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp"))

    @staticmethod
    def can_mount() -> bool:
        """Whether this process may mount file systems."""
        return os.geteuid() == 0

    def fill(self) -> None:
        """Write until no space is left."""
        with (self.path / "fill").open("wb", buffering=0) as file:
            try:
                while file.write(_PART):
                    pass
            except OSError:
                return

    def empty(self) -> None:
        """Give the space back."""
        (self.path / "fill").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(self.path)], check=True
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Lazily, since a process that ends may still have a log open.
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        self.path.rmdir()
