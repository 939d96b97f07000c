"""A folder of safetensors files: what is in it, whether it fits, and parts of its tensors.

Nothing in the folder is trusted: whatever is missing, too much, broken or of another shape ends
in a CheckpointError of one line. Nothing but safetensors is ever opened.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from pagedray.errors import CheckpointError
from workers.weights.tensor_entries import ITEM_BYTES, first_line, read_entries

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

    from workers.layers.weight import WeightShard

__all__ = ["Checkpoint"]

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


class Checkpoint:
    """The tensors of a folder; a context manager that keeps the files open that it has read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = read_entries(folder)
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

    def check_tensors(self, shards: Iterable[WeightShard], *, is_head_tied: bool) -> None:
        """Raise CheckpointError unless the tensors are those of the shards, in their shapes."""
        names = set()
        for shard in shards:
            names.add(self._stored_name(shard.name))
            self._check_shard(shard)
        if is_head_tied:
            names.add("lm_head.weight")
        for name, entry in self._entries.items():
            if name not in names and not name.endswith(_HARMLESS_ENDINGS):
                raise CheckpointError(
                    f"{entry.path}: tensor {name} has no place in the model that config.json "
                    "describes."
                )

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, in the target's type."""
        name = self._stored_name(shard.name)
        entry = self._entries[name]
        first, end, _ = shard.part[0].indices(shard.shape[0])
        row_bytes = math.prod(shard.target.shape[1:]) * ITEM_BYTES[entry.dtype]
        height = max(1, _CHUNK_BYTES // max(1, row_bytes))
        try:
            tensor = self._opened(entry.path).get_slice(name)
            for low in range(first, end, height):
                high = min(low + height, end)
                shard.target[low - first : high - first] = tensor[
                    (slice(low, high), *shard.part[1:])
                ]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} cannot be read: {first_line(error)}."
            ) from None

    def _stored_name(self, name: str) -> str:
        """Return a tensor's name here; one saved without its head leaves out the first word."""
        return name if name in self._entries else name.partition(".")[2]

    def _check_shard(self, shard: WeightShard) -> None:
        entry = self._entries.get(self._stored_name(shard.name))
        if entry is None:
            raise CheckpointError(f"{self._folder}: tensor {shard.name} is missing.")
        if entry.shape != shard.shape:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} must have shape {list(shard.shape)}, "
                f"not {list(entry.shape)}."
            )
        if entry.dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} must be of type {', '.join(ITEM_BYTES)}, "
                f"not {entry.dtype}."
            )

    def _opened(self, path: Path) -> Any:  # Any: safetensors has no types
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]
