"""The headers of a folder of safetensors files: which tensors it holds, of which type and shape."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from safetensors import SafetensorError, safe_open

from pagedray.errors import CheckpointError
from pagedray.files import check_is_no_pointer, has_file, has_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pagedray.model_config import Dtype

__all__ = [
    "GGUF_LINK",
    "GGUF_SHARD",
    "ITEM_BYTES",
    "TensorEntry",
    "common_dtype",
    "folder_dtype",
    "gguf_link",
    "read_entries",
    "shown_name",
    "weight_files",
]

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
}
_DTYPES: Mapping[str, Dtype] = {
    "F64": "float32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
GGUF_LINK = "model.gguf"
"""A link to the GGUF file in a folder of files that were made of its metadata."""
GGUF_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf$")
"""A name of one of several files: the name of the model, the number of the file, and of files."""
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
_MAX_SHOWN = 200
"""Characters of a name in a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file, as its header describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    """Where the values of the tensor begin in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the first dimension."""
        return math.prod(self.shape[1:]) * ITEM_BYTES.get(self.dtype, 0)

    @property
    def row_step(self) -> int:
        """Rows that have to be read together to convert them; 0 if values are used as stored."""
        return 0

    # Any: an array of NumPy and a tensor of torch, which this module does not import.
    def converted(self, stored: Any) -> Any:
        """Return the values of whole rows; only if `row_step` is not 0."""
        raise NotImplementedError


def read_entries(folder: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a folder by name. Raises CheckpointError."""
    try:
        return _entries_of_folder(folder)
    except OSError as error:
        path = error.filename or folder
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None


def folder_dtype(folder: Path) -> Dtype | None:
    """Return the common dtype of the first file of weights, or None if there is no such file.

    Raises CheckpointError.
    """
    try:
        names = weight_files(folder, {path.name for path in folder.iterdir()})
        first = _inside(folder, names[0]) if names else None
        if first is None or not has_file(first):
            return None
        entries = _header_entries(first).items()
    except OSError as error:
        path = error.filename or folder
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    return common_dtype((name, entry.dtype, math.prod(entry.shape)) for name, entry in entries)


def common_dtype(tensors: Iterable[tuple[str, str, int]]) -> Dtype | None:
    """Return the dtype of most elements, or None if only quantized weights are stored.

    Each tensor is its name, its dtype in safetensors and its number of elements. Scales of
    quantized weights do not count.
    """
    sizes: dict[Dtype, int] = {}
    for name, stored, size in tensors:
        if (dtype := _DTYPES.get(stored)) and "scale" not in name.rpartition(".")[2]:
            sizes[dtype] = sizes.get(dtype, 0) + size
    return max(sizes, key=sizes.__getitem__, default=None)


def _entries_of_folder(folder: Path) -> dict[str, TensorEntry]:
    # Like Transformers, prefer the single file to an index.
    if has_path(folder / _SINGLE):
        return _entries_of_file(_inside(folder, _SINGLE))
    if not has_path(folder / _INDEX):
        raise CheckpointError(f"No {_SINGLE} or {_INDEX} found in {folder}.")
    return _entries_of_index(folder)


def gguf_link(folder: Path) -> Path | None:
    """Return the GGUF file that has the tensors of a folder, if any."""
    link = folder / GGUF_LINK
    return link.readlink() if link.is_symlink() else None


def weight_files(folder: Path, names: Collection[str]) -> list[str]:
    """Return which of the files named `names` hold the tensors; empty if there is none.

    An index must be in the folder; the others need not be. Raises CheckpointError.
    """
    if _SINGLE in names:
        return [_SINGLE]
    if _INDEX not in names:
        return []
    return sorted(set(_listed_files(folder / _INDEX).values()))


def _entries_of_index(folder: Path) -> dict[str, TensorEntry]:
    index = folder / _INDEX
    listed = _listed_files(index)
    entries: dict[str, TensorEntry] = {}
    for name in sorted(set(listed.values())):
        path = _inside(folder, name)
        if not has_file(path):
            raise CheckpointError(f"{index}: the file {name!r:.200} is missing.")
        for tensor, entry in _entries_of_file(path).items():
            if tensor in entries:
                raise CheckpointError(
                    f"{path}: tensor {shown_name(tensor)} is also in {entries[tensor].path.name}."
                )
            entries[tensor] = entry
    for tensor, name in listed.items():
        if tensor not in entries or entries[tensor].path.name != Path(name).name:
            raise CheckpointError(f"{folder / name}: tensor {shown_name(tensor)} is missing.")
    return entries


def _listed_files(index: Path) -> dict[str, str]:
    """Return the file name of each tensor that an index lists."""
    _check_is_file(index)
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(
            f"{index} has more than {_MAX_INDEX_BYTES} bytes, which is not allowed."
        )
    values = _parsed(index, index.read_bytes())
    listed = values.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map must be an object that maps tensors to files.")
    for tensor, name in listed.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {shown_name(tensor)} must be in a .safetensors file, not "
                f"{name!r:.60}."
            )
    return listed


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in the folder; raise CheckpointError if it resolves elsewhere.

    Links into the blobs of the Hugging Face cache are allowed.
    """
    path = folder / name
    try:
        # Fails, unlike `realpath`, if the name is too long.
        with suppress(FileNotFoundError):
            path.lstat()
        root, target = folder.resolve(), Path(os.path.realpath(path))
    except (OSError, ValueError):
        raise CheckpointError(f"{folder} has no file {name!r:.{_MAX_SHOWN}}.") from None
    roots = [root]
    # The folder of a module is in that of the model.
    snapshot = next((one for one in (root, root.parent) if one.parent.name == "snapshots"), None)
    if snapshot is not None:
        model = snapshot.parent.parent
        # The cache keeps blobs of one model, and some that several models share.
        roots += [model / "blobs", model.parent / "blobs"]
    if Path(name).name != name or not any(target.is_relative_to(place) for place in roots):
        raise CheckpointError(
            f"{folder}: {name!r:.{_MAX_SHOWN}} is a path or link to a file outside of the folder."
        )
    return path


def _entries_of_file(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file, after checking all of its header."""
    entries = _header_entries(path)
    _check_readable(path)
    return entries


def _header_entries(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a file, after checking the entry of each in its header."""
    _check_is_file(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            check_is_no_pointer(path)
            raise CheckpointError(
                f"{path} is truncated or corrupt: it has {size} bytes, and a header of {length}."
            )
        header = _parsed(path, file.read(length))
    start = _LENGTH_BYTES + length
    return {
        name: _entry(path, name, value, start=start, available=size - start)
        for name, value in header.items()
        if name != "__metadata__"
    }


def _check_is_file(path: Path) -> None:
    """Raise CheckpointError unless the path can be read as a file with an end."""
    if not has_file(path):
        raise CheckpointError(f"{path} is missing.")


def _entry(path: Path, name: str, value: object, *, start: int, available: int) -> TensorEntry:
    entry: dict[str, Any] = value if isinstance(value, dict) else {}  # Any: parsed JSON
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets, 2):
        raise CheckpointError(
            f"{path}: the header's entry of tensor {shown_name(name)} is invalid."
        )
    first, end = offsets
    if end > available:
        raise CheckpointError(
            f"{path} is truncated: tensor {shown_name(name)} ends at byte {end} of {available}."
        )
    expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and end - first != expected:
        raise CheckpointError(
            f"{path}: tensor {shown_name(name)} of shape {shape!s:.{_MAX_SHOWN}} and dtype {dtype} "
            f"must have {expected} bytes, not {end - first}."
        )
    # A number is a tensor of one element.
    return TensorEntry(path=path, dtype=dtype, shape=tuple(shape) or (1,), first_byte=start + first)


def _check_readable(path: Path) -> None:
    """Have the library check the rest: overlapping offsets, gaps and trailing bytes."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}.") from None


def _are_sizes(value: object, length: int | None = None) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and length in (None, len(value))
        and all(type(size) is int and size >= 0 for size in value)
    )


def _parsed(path: Path, text: bytes) -> Mapping[str, Any]:  # Any: parsed JSON
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {first_line(error)}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must contain a JSON object.")
    return values


def shown_name(name: str) -> str:
    """Return the name of a tensor for a message of one line."""
    return name if name.isprintable() and len(name) <= _MAX_SHOWN else f"{name!r:.{_MAX_SHOWN}}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a full stop."""
    return str(error).partition("\n")[0].rstrip(".")
