"""A folder of safetensors files: what is in it, whether it fits, and parts of its tensors.

Nothing in the folder is trusted: whatever is missing, too much, broken or of another shape ends
in a CheckpointError of one line. Nothing but safetensors is ever opened.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from safetensors import SafetensorError, safe_open

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

    from workers.layers.weight import WeightSlot

__all__ = ["Checkpoint"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 100 * 2**20
_LENGTH_BYTES = 8
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Parts pass through host memory in chunks, so that a large table needs no second copy.
_CHUNK_BYTES = 64 * 2**20
# Checkpoints made long ago hold the frequencies of their rotary embeddings, or 0, 1, 2 and so on;
# those of encoders a layer for a task of their training.
_HARMLESS_ENDINGS = (
    ".rotary_emb.inv_freq",
    "embeddings.position_ids",
    "pooler.dense.bias",
    "pooler.dense.weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What the header of a file says of one tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder; a context manager that keeps the files open that it has read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = _entries_of(folder)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}  # Any: safetensors has no types

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()
        self._stack.close()

    def check(self, slots: Iterable[WeightSlot], *, is_head_tied: bool) -> None:
        """Raise CheckpointError unless the tensors are those of the slots, in their shapes."""
        names = set()
        for slot in slots:
            names.add(self._stored_name(slot.name))
            self._check_slot(slot)
        if is_head_tied:
            names.add("lm_head.weight")
        for name, entry in self._entries.items():
            if name not in names and not name.endswith(_HARMLESS_ENDINGS):
                raise CheckpointError(
                    f"{entry.path}: tensor {name} has no place in the model that config.json "
                    "describes."
                )

    def fill(self, slot: WeightSlot) -> None:
        """Write this rank's part of a tensor to the slot's target, in the target's type."""
        name = self._stored_name(slot.name)
        entry = self._entries[name]
        first, end, _ = slot.part[0].indices(slot.shape[0])
        row_bytes = math.prod(slot.target.shape[1:]) * _ITEM_BYTES[entry.dtype]
        height = max(1, _CHUNK_BYTES // max(1, row_bytes))
        try:
            tensor = self._opened(entry.path).get_slice(name)
            for low in range(first, end, height):
                high = min(low + height, end)
                slot.target[low - first : high - first] = tensor[(slice(low, high), *slot.part[1:])]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{entry.path}: tensor {slot.name} cannot be read: {_first_line(error)}."
            ) from None

    def _stored_name(self, name: str) -> str:
        """Return a tensor's name here; one saved without its head leaves out the first word."""
        return name if name in self._entries else name.partition(".")[2]

    def _check_slot(self, slot: WeightSlot) -> None:
        entry = self._entries.get(self._stored_name(slot.name))
        if entry is None:
            raise CheckpointError(f"{self._folder}: tensor {slot.name} is missing.")
        if entry.shape != slot.shape:
            raise CheckpointError(
                f"{entry.path}: tensor {slot.name} must have shape {list(slot.shape)}, "
                f"not {list(entry.shape)}."
            )
        if entry.dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{entry.path}: tensor {slot.name} must be of type {', '.join(_ITEM_BYTES)}, "
                f"not {entry.dtype}."
            )

    def _opened(self, path: Path) -> Any:  # Any: safetensors has no types
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


def _entries_of(folder: Path) -> dict[str, _Entry]:
    # One file is preferred to an index where both are, as Transformers does.
    if (folder / _SINGLE).exists():
        return _entries_of_file(_inside(folder, _SINGLE))
    if not (folder / _INDEX).exists():
        raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}.")
    return _entries_of_index(folder)


def _entries_of_index(folder: Path) -> dict[str, _Entry]:
    index = folder / _INDEX
    listed = _listed_files(index)
    entries: dict[str, _Entry] = {}
    for name in sorted(set(listed.values())):
        path = _inside(folder, name)
        if not path.is_file():
            raise CheckpointError(f"{index}: the file {name!r} is missing.")
        for tensor, entry in _entries_of_file(path).items():
            if tensor in entries:
                raise CheckpointError(
                    f"{path}: tensor {tensor} is also in {entries[tensor].path.name}."
                )
            entries[tensor] = entry
    for tensor, name in listed.items():
        if tensor not in entries or entries[tensor].path.name != Path(name).name:
            raise CheckpointError(f"{folder / name}: tensor {tensor} is missing.")
    return entries


def _listed_files(index: Path) -> dict[str, str]:
    """Return the file name of each tensor that an index lists."""
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} is larger than {_MAX_INDEX_BYTES} bytes.")
    values = _parsed(index, index.read_bytes())
    listed = values.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: weight_map must be an object that names files.")
    for tensor, name in listed.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {tensor} must be in a .safetensors file, not {name!r:.60}."
            )
    return listed


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file; refuse one that leads out of the folder.

    The cache of Hugging Face's hub keeps files beside its folders of links, and is let through.
    """
    path = folder / name
    root, target = folder.resolve(), path.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if Path(name).name != name or not any(target.is_relative_to(place) for place in roots):
        raise CheckpointError(f"{path} leads out of the folder {folder}.")
    return path


def _entries_of_file(path: Path) -> dict[str, _Entry]:
    """Return what a file's header says, once it agrees with itself and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} has {size} bytes, too few for the header of {length} that it announces."
            )
        header = _parsed(path, file.read(length))
    available = size - _LENGTH_BYTES - length
    entries = {
        name: _entry(path, name, value, available)
        for name, value in header.items()
        if name != "__metadata__"
    }
    _check_readable(path)
    return entries


def _entry(path: Path, name: str, value: object, available: int) -> _Entry:
    entry: dict[str, Any] = value if isinstance(value, dict) else {}  # Any: parsed JSON
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets, 2):
        raise CheckpointError(f"{path}: the header's entry of tensor {name} is broken.")
    first, end = offsets
    if end > available:
        raise CheckpointError(
            f"{path} is truncated: tensor {name} ends at byte {end} of {available}."
        )
    expected = math.prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if dtype in _ITEM_BYTES and end - first != expected:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {shape} and type {dtype} must have {expected} bytes, "
            f"not {end - first}."
        )
    return _Entry(path=path, dtype=dtype, shape=tuple(shape))


def _check_readable(path: Path) -> None:
    """Let the library check the rest: offsets that overlap, gaps, bytes that are left over."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}.") from None


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
        raise CheckpointError(f"{path} holds no valid JSON: {_first_line(error)}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return values


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
