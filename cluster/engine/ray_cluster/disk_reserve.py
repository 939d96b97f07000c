"""Disk space that is kept for the start of new ranks."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["DiskReserve"]

_NUM_BYTES = 16 * 2**20


class DiskReserve:
    """An unnamed file that takes 16 MiB, which is more than the logs of starting ranks.

    A process that Ray starts exits if it cannot write its log.
    """

    def __init__(self, folder: Path) -> None:
        """Reserve space on the disk of `folder`, as far as there is any."""
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # open until `close`
        self._fill()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the space back for a while."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give the space back. May be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _fill(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.posix_fallocate(self._file.fileno(), 0, _NUM_BYTES)
