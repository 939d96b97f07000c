"""Reads the header of a GGUF file: metadata and the place of each tensor.

The header is not trusted. Every count and length is compared with the bytes that remain in the file
before memory is allocated for it. The reader of the `gguf` package lacks these checks, and takes
seconds for a vocabulary; its constants are used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from pagedray.errors import CheckpointError
from workers.weights.tensor_entries import GGUF_SHARD

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GgufFile", "GgufTensor", "Value", "shard_paths"]

Value = bool | int | float | str | list[str] | np.ndarray
"""A value of the metadata; arrays of numbers are NumPy arrays."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_NAME_BYTES = 2**16
_MAX_DIMENSIONS = 4
_NUMBERS: Mapping[int, np.dtype[np.generic]] = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("?"),
}
_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Rows are stored one after another; each row is blocks of `block_size` elements.
    """

    path: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost dimension first, which is the reverse of the order in the file."""
    first_byte: int
    """Position in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the innermost dimension."""
        block_size, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block_size * block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the header. Raises CheckpointError."""
        try:
            with path.open("rb") as file:
                # An empty file cannot be mapped.
                if not file.read(1):
                    raise CheckpointError(f"{path} is empty.")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                    return _Parser(path, memory).parse()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def shard_paths(path: Path) -> list[Path]:
    """Return the files of a model that is split into shards, or only `path`.

    Raises CheckpointError if `path` is not the first shard, or a shard is missing.
    """
    match = GGUF_SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise CheckpointError(f"{path} is shard {number}; give the first of {count} shards.")
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for shard in paths:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing; {path.name} is one of {count} shards.")
    return paths


class _Parser:
    """Walks a mapped header once."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self._path = path
        self._memory = memory
        self._position = 0

    def parse(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise self._error("has no GGUF header")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise self._error(
                f"has GGUF version {version}; supported versions are 2 and 3, little-endian"
            )
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        # The shortest entries: a name of no bytes, and then a type or a count.
        self._check_count("tensors", num_tensors, 24)
        self._check_count("metadata fields", num_fields, 13)
        metadata: dict[str, Value] = {}
        for _ in range(num_fields):
            name = self._name("metadata field")
            if name in metadata:
                raise self._error(f"has the metadata field {name!r:.100} twice")
            metadata[name] = self._value(self._number("<I"), name)
        entries = dict(self._tensor_info() for _ in range(num_tensors))
        if len(entries) != num_tensors:
            raise self._error("has two tensors of the same name")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._error("has an invalid general.alignment")
        start = -(-self._position // alignment) * alignment
        tensors = {
            name: self._tensor(name, *entry, start=start, alignment=alignment)
            for name, entry in entries.items()
        }
        self._check_no_overlap(tensors)
        return GgufFile(self._path, metadata, tensors)

    def _tensor_info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._name("tensor")
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"has a tensor of {num_dimensions} dimensions")
        sizes = tuple(self._number("<Q") for _ in range(num_dimensions))
        return name, (sizes[::-1], self._number("<I"), self._number("<Q"))

    def _tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        number: int,
        offset: int,
        *,
        start: int,
        alignment: int,
    ) -> GgufTensor:
        try:
            kind = GGMLQuantizationType(number)
            block_size, _ = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._error(f"has tensor {name!r:.100} of an unknown type {number}") from None
        if not all(shape) or shape[-1] % block_size or offset % alignment:
            raise self._error(f"has an invalid shape or offset of tensor {name!r:.100}")
        tensor = GgufTensor(path=self._path, type=kind, shape=shape, first_byte=start + offset)
        if tensor.first_byte + tensor.num_bytes > len(self._memory):
            raise CheckpointError(
                f"{self._path} is truncated: tensor {name!r:.100} ends at byte "
                f"{tensor.first_byte + tensor.num_bytes} of {len(self._memory)}."
            )
        return tensor

    def _check_no_overlap(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].first_byte):
            if tensor.first_byte < end:
                raise self._error(f"has tensor {name!r:.100} within another tensor")
            end = tensor.first_byte + tensor.num_bytes

    def _value(self, kind: int, name: str) -> Value:
        if kind == GGUFValueType.STRING:
            return self._text(self._number("<Q"))
        if kind == GGUFValueType.ARRAY:
            return self._array(name)
        if kind not in _NUMBERS:
            raise self._error(f"has metadata field {name!r:.100} of an unknown type {kind}")
        dtype = _NUMBERS[kind]
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        assert isinstance(value, bool | int | float)
        return value

    def _array(self, name: str) -> list[str] | npt.NDArray[np.generic]:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == GGUFValueType.STRING:
            self._check_count(f"strings in {name!r:.100}", count, _LENGTH.size)
            return [self._text(self._number("<Q")) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._error(f"has an array {name!r:.100} of an unsupported type {kind}")
        dtype = _NUMBERS[kind]
        self._check_count(f"elements in {name!r:.100}", count, dtype.itemsize)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _name(self, what: str) -> str:
        length = self._number("<Q")
        if length > _MAX_NAME_BYTES:
            raise self._error(f"has a {what} with a name of {length} bytes")
        return self._text(length)

    def _text(self, num_bytes: int) -> str:
        # Bytes that are not UTF-8 stay distinguishable, and fail where the text is used.
        return self._take(num_bytes).decode("utf-8", "surrogateescape")

    def _number(self, format: str) -> int:
        value: int = struct.unpack(format, self._take(struct.calcsize(format)))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._memory):
            raise CheckpointError(
                f"{self._path} is truncated: its header ends at byte {len(self._memory)}."
            )
        taken = self._memory[self._position : end]
        self._position = end
        return taken

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count * min_bytes > len(self._memory) - self._position:
            raise self._error(f"cannot have {count} {what}, which are more than its bytes")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {problem}.")
