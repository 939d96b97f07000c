"""Reads the columns of a matrix that one rank of several needs from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MAX_PARTS", "Columns", "read_bytes", "read_columns"]

MAX_PARTS = os.sysconf("SC_IOV_MAX") // 2
"""Rows of which a call can read columns: each row is a buffer, and so is each gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The bytes of each row that are meant, which are adjacent."""

    first_byte: int
    num_bytes: int
    row_bytes: int

    @property
    def num_other_bytes(self) -> int:
        """Bytes between two rows."""
        return self.row_bytes - self.num_bytes


def read_columns(
    descriptor: int,
    memory: memoryview,
    position: int,
    columns: Columns,
    other: memoryview,
    path: Path,
) -> None:
    """Fill memory with the columns of the rows from a position, at most `MAX_PARTS` if not all.

    The bytes between are read too, to `other`, of at least `num_other_bytes`, which stays in the
    CPU's cache: a call for each row would take longer. Raises OSError, and CheckpointError if the
    file is shorter.
    """
    position += columns.first_byte
    if not columns.num_other_bytes:
        read_bytes(descriptor, memory, position, path)
        return
    size = columns.num_bytes
    parts = [memory[first : first + size] for first in range(0, len(memory), size)]
    between = other[: columns.num_other_bytes]
    buffers = [buffer for part in parts for buffer in (part, between)][:-1]
    num_bytes = os.preadv(descriptor, buffers, position)
    if num_bytes < len(parts) * columns.row_bytes - columns.num_other_bytes:
        # Some file systems return less than there is.
        for index, part in enumerate(parts):
            read_bytes(descriptor, part, position + index * columns.row_bytes, path)


def read_bytes(descriptor: int, memory: memoryview, position: int, path: Path) -> None:
    """Fill memory from a position. Raises OSError, and CheckpointError if the file is shorter."""
    while memory:
        num_bytes = os.preadv(descriptor, [memory], position)
        if num_bytes == 0:
            raise CheckpointError(f"{path} is truncated: it ends at byte {position}.")
        memory = memory[num_bytes:]
        position += num_bytes
