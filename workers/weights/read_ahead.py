"""Asks the kernel for bytes of files before they are read, so that few reads wait for a disk.

Threads that read and check pieces of tensors in turns would leave the disk idle while they check.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FileRange", "ReadAhead"]

_MOST_BYTES = 2**29
"""Asked for and not yet read: more than the pieces that all threads of a rank read at a time."""
_FEW_BYTES = _MOST_BYTES // 2
_STEP_BYTES = 2**23


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Adjacent bytes of an open file."""

    descriptor: int
    first_byte: int
    num_bytes: int


class ReadAhead:
    """A thread that requests ranges of files, in the order in which others read them."""

    def __init__(self, ranges: Sequence[FileRange]) -> None:
        self._ranges = ranges
        self._condition = threading.Condition()
        self._num_ahead = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pagedray-read-ahead", daemon=True)
        self._thread.start()

    def note_read(self, num_bytes: int) -> None:
        """Count bytes that are being read; any thread may call this."""
        with self._condition:
            self._num_ahead -= num_bytes
            # Rarely, since the woken thread takes a core from a reading thread.
            if self._num_ahead < _FEW_BYTES:
                self._condition.notify()

    def close(self) -> None:
        """End the thread; the descriptors may be closed then."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        for part in self._ranges:
            end = part.first_byte + part.num_bytes
            for position in range(part.first_byte, end, _STEP_BYTES):
                num_bytes = min(_STEP_BYTES, end - position)
                with self._condition:
                    if self._num_ahead >= _MOST_BYTES:
                        self._condition.wait_for(self._asks_again)
                    if self._is_closed:
                        return
                    self._num_ahead += num_bytes
                os.posix_fadvise(part.descriptor, position, num_bytes, os.POSIX_FADV_WILLNEED)

    def _asks_again(self) -> bool:
        return self._is_closed or self._num_ahead < _FEW_BYTES
