"""Reads parts of tensors from files, in chunks: into their targets, or into buffers.

Files are not mapped: page faults would take longer than the copies, and mapped pages would count as
memory of the process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedray.errors import CheckpointError
from workers.weights.tensor_entries import ITEM_BYTES, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


__all__ = ["FileRange", "ReadAhead", "TensorReader", "tensor_digest"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
# Small enough to stay in the CPU's cache until it is copied or checked.
_CHUNK_BYTES = 2**19
_DIRECT_CHUNK_BYTES = 2**22
# A GPU reads a chunk from memory, and every copy to it takes a call.
_PINNED_CHUNK_BYTES = 2**24
# Narrower columns are copied faster than the kernel changes buffers.
_MIN_COLUMNS_BYTES = 512
MAX_PARTS = os.sysconf("SC_IOV_MAX") // 2
"""Rows of which a call can read columns: each row is a buffer, and so is each gap."""
_MOST_BYTES = 2**29
"""Asked for and not yet read: more than the pieces that all threads of a rank read at a time."""
_FEW_BYTES = _MOST_BYTES // 2
_STEP_BYTES = 2**23

_SAMPLE_BYTES = 4096
_DISTANCE_BYTES = 2**24
"""Distance from the beginning of one sample to that of the next."""


class TensorReader:
    """Opens each file once. Threads may read at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptors: dict[Path, int] = {}
        self._ahead: ReadAhead | None = None
        self._free_buffers: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        """Free buffers, by whether they are pinned."""

    def close(self) -> None:
        """Close the files."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def file_range(self, entry: TensorEntry, part: tuple[slice, ...]) -> FileRange:
        """Return the range that `chunks` of these reads. Raises OSError."""
        first, end, _ = part[0].indices(entry.shape[0])
        row_bytes = entry.row_bytes
        return FileRange(
            descriptor=self._descriptor(entry.path),
            first_byte=entry.first_byte + first * row_bytes,
            num_bytes=max(0, end - first) * row_bytes,
        )

    def read_ahead(self, ranges: Sequence[FileRange]) -> None:
        """Ask the kernel to read these ranges in advance, in this order."""
        assert self._ahead is None
        self._ahead = ReadAhead(ranges)

    def read(self, entry: TensorEntry, first_byte: int, num_bytes: int) -> bytes:
        """Return bytes of a tensor. Raises OSError, and CheckpointError if the file is shorter."""
        memory = bytearray(num_bytes)
        position = entry.first_byte + first_byte
        read_bytes(self._descriptor(entry.path), memoryview(memory), position, entry.path)
        return bytes(memory)

    def chunks(
        self, entry: TensorEntry, part: tuple[slice, ...], target: torch.Tensor | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of a tensor's first dimension, and their part of it.

        A chunk is in the memory of the `target` of the part, if it can be read there, or on the
        target's GPU, or else in memory that the next chunk overwrites. `part` has a slice for each
        dimension, at least one. Raises OSError, and CheckpointError if the file has become shorter.
        """
        if entry.row_step:
            return self._converted_chunks(entry, part)
        columns = _columns(entry, part)
        memory = None if target is None else _bytes_of(target, entry, columns)
        if target is not None and memory is not None:
            return self._chunks_in_place(entry, part[0], columns, target, memory)
        gpu = target.device if target is not None and target.device.type == "cuda" else None
        return self._chunks_in_buffers(entry, part, gpu)

    def _chunks_in_place(
        self,
        entry: TensorEntry,
        part_rows: slice,
        columns: Columns,
        target: torch.Tensor,
        memory: torch.Tensor,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield chunks that are read into the `memory` of the target."""
        height = _DIRECT_CHUNK_BYTES // max(1, columns.row_bytes)
        if columns.num_other_bytes:
            height = min(height, MAX_PARTS)
        descriptor = self._descriptor(entry.path)
        begin = 0
        with self._buffer(columns.num_other_bytes, is_pinned=False) as others:
            for rows in _row_chunks(part_rows, entry, height):
                num_rows = rows.stop - rows.start
                self._note_read(num_rows * columns.row_bytes)
                place = memory[begin * columns.num_bytes :][: num_rows * columns.num_bytes]
                read_columns(
                    descriptor,
                    place.numpy().data,
                    entry.first_byte + rows.start * columns.row_bytes,
                    columns,
                    others.numpy().data,
                    entry.path,
                )
                yield rows, target[begin : begin + num_rows]
                begin += num_rows

    def _chunks_in_buffers(
        self, entry: TensorEntry, part: tuple[slice, ...], gpu: torch.device | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield chunks of whole rows, read into a buffer and copied to the GPU if any."""
        is_pinned = gpu is not None
        row_bytes = entry.row_bytes
        height = (_PINNED_CHUNK_BYTES if is_pinned else _CHUNK_BYTES) // max(1, row_bytes)
        chunks = list(_row_chunks(part[0], entry, height))
        buffer_bytes = max((rows.stop - rows.start for rows in chunks), default=0) * row_bytes
        descriptor = self._descriptor(entry.path)
        with self._buffer(buffer_bytes, is_pinned=is_pinned) as buffer:
            for rows in chunks:
                num_rows = rows.stop - rows.start
                self._note_read(num_rows * row_bytes)
                chunk = buffer[: num_rows * row_bytes]
                position = entry.first_byte + rows.start * row_bytes
                read_bytes(descriptor, chunk.numpy().data, position, entry.path)
                whole_rows = chunk.view(_DTYPES[entry.dtype]).view(num_rows, *entry.shape[1:])
                if gpu is not None:
                    # The CPU would be slow to gather columns and to convert them.
                    whole_rows = whole_rows.to(gpu)
                yield rows, whole_rows[(slice(None), *part[1:])]

    def _converted_chunks(
        self, entry: TensorEntry, part: tuple[slice, ...]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield chunks of whole rows, converted on the CPU."""
        step = entry.row_step
        height = max(1, _DIRECT_CHUNK_BYTES // entry.row_bytes // step) * step
        first, end, _ = part[0].indices(entry.shape[0])
        for low in range(first // step * step, end, height):
            rows = slice(low, min(low + height, -(-end // step) * step))
            num_bytes = (rows.stop - rows.start) * entry.row_bytes
            self._note_read(num_bytes)
            stored = np.frombuffer(self.read(entry, low * entry.row_bytes, num_bytes), np.uint8)
            wanted = slice(max(rows.start, first), min(rows.stop, end))
            values = entry.converted(stored)[wanted.start - low : wanted.stop - low]
            yield wanted, values[(slice(None), *part[1:])]

    def _note_read(self, num_bytes: int) -> None:
        if self._ahead is not None:
            self._ahead.note_read(num_bytes)

    @contextmanager
    def _buffer(self, num_bytes: int, *, is_pinned: bool) -> Iterator[torch.Tensor]:
        free = self._free_buffers[is_pinned]
        try:
            buffer = free.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if len(buffer) < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        try:
            yield buffer
        finally:
            free.append(buffer)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[path]


def _row_chunks(part_rows: slice, entry: TensorEntry, height: int) -> Iterator[slice]:
    """Yield slices of this many rows, or of one row if `height` is 0, and the rest."""
    first, end, _ = part_rows.indices(entry.shape[0])
    for low in range(first, end, max(1, height)):
        yield slice(low, min(low + max(1, height), end))


def _columns(entry: TensorEntry, part: tuple[slice, ...]) -> Columns:
    """Return which bytes of a row of the first dimension are of a part; of matrices, or all."""
    item_bytes = ITEM_BYTES[entry.dtype]
    row_bytes = entry.row_bytes
    if len(part) != 2:
        return Columns(first_byte=0, num_bytes=row_bytes, row_bytes=row_bytes)
    first, end, _ = part[1].indices(entry.shape[1])
    return Columns(
        first_byte=first * item_bytes, num_bytes=(end - first) * item_bytes, row_bytes=row_bytes
    )


def _bytes_of(target: torch.Tensor, entry: TensorEntry, columns: Columns) -> torch.Tensor | None:
    """Return the memory of a target, if its part can be read there as it is stored."""
    is_as_stored = (
        target.device.type == "cpu"
        and target.dtype == _DTYPES[entry.dtype]
        and target.is_contiguous()
        and target.nbytes == len(target) * columns.num_bytes
    )
    is_narrow = columns.num_other_bytes > 0 and columns.num_bytes < _MIN_COLUMNS_BYTES
    return target.view(-1).view(torch.uint8) if is_as_stored and not is_narrow else None


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


def tensor_digest(name: str, entry: TensorEntry, reader: TensorReader) -> bytes:
    """Return 32 bytes for a tensor's name, dtype, shape, and samples of its values.

    All values would take long to read. The samples are at its beginning and its end, where
    training may change a few rows only, and at equal distances between them. Raises OSError, and
    CheckpointError if the file has become shorter.
    """
    num_bytes = entry.shape[0] * entry.row_bytes
    digest = hashlib.sha256(repr((name, entry.dtype, entry.shape)).encode())
    for first in (*range(0, num_bytes, _DISTANCE_BYTES), max(0, num_bytes - _SAMPLE_BYTES)):
        digest.update(reader.read(entry, first, min(_SAMPLE_BYTES, num_bytes - first)))
    return digest.digest()
