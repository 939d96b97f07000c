"""The tensors of a checkpoint: whether they fit the model, and a rank's parts of them.

The folder is not trusted: missing, unexpected, corrupt or misshapen tensors raise a
CheckpointError of one line. Only safetensors files are opened, never pickles.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from pagedray.errors import CheckpointError
from workers.weights.staged_copy import StagedCopy
from workers.weights.tensor_entries import ITEM_BYTES, first_line, read_entries, shown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from pagedray.config import TextTensors
    from workers.layers.weight import WeightShard

__all__ = ["HEAD_NAME", "Checkpoint"]

logger = logging.getLogger(__name__)

HEAD_NAME = "lm_head.weight"

# Parts pass through host memory in chunks, so that a large table is never copied whole.
_CHUNK_BYTES = 16 * 2**20
# Older checkpoints store rotary frequencies or position ids, which are computed here, and encoders
# store the pooler of a training task.
_IGNORED_SUFFIXES = (
    ".rotary_emb.inv_freq",
    "embeddings.position_ids",
    "pooler.dense.bias",
    "pooler.dense.weight",
)


class Checkpoint:
    """The tensors of a folder; a context manager that keeps opened files open.

    Threads may fill shards at the same time.
    """

    def __init__(self, folder: Path, text_tensors: TextTensors | None = None) -> None:
        self._folder = folder
        self._entries = read_entries(folder)
        self._skipped = text_tensors.skipped if text_tensors is not None else ()
        self._stored_names = _stored_names(self._entries, text_tensors)
        """The stored name of each tensor that a multimodal model stores under another one."""
        self._stack = ExitStack()
        self._staged = StagedCopy()
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

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._entries

    def check_tensors(self, shards: Iterable[WeightShard], *, has_spare_head: bool) -> None:
        """Raise CheckpointError unless the folder has exactly these tensors, in their shapes.

        With `has_spare_head` it may also have an output head, which the model does not read. Those
        of other modalities are skipped.
        """
        names = set()
        for shard in shards:
            names.add(self._stored_name(shard.name))
            self._check_shard(shard)
        if has_spare_head:
            names.update((HEAD_NAME, self._stored_names.get(HEAD_NAME, HEAD_NAME)))
        num_skipped = 0
        for name, entry in self._entries.items():
            if name in names or name.endswith(_IGNORED_SUFFIXES):
                continue
            if not name.startswith(self._skipped):
                raise CheckpointError(
                    f"{entry.path}: unexpected tensor {shown_name(name)}, which the model of "
                    "config.json does not have."
                )
            num_skipped += 1
        if num_skipped:
            logger.info("Skipped %s vision tensors in %s", num_skipped, self._folder)

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""
        for target, chunk in self.copies(shard):
            self._staged.copy(target, chunk)

    def copies(self, shard: WeightShard) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield rows of a shard's target, and what `fill_shard` writes to them, as stored."""
        first, _, _ = shard.part[0].indices(shard.shape[0])
        for rows, chunk in self._chunks(shard.name, shard.part):
            yield shard.target[rows.start - first : rows.stop - first], chunk

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows of a whole tensor, as stored."""
        shape = self._entries[self._stored_name(name)].shape
        for _, chunk in self._chunks(name, (slice(None),) * len(shape)):
            yield chunk

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors are stored with equal dtypes, shapes and values."""
        one, two = (self._entries[self._stored_name(each)] for each in (name, other))
        if one.shape != two.shape or one.dtype != two.dtype or one.dtype not in ITEM_BYTES:
            return False
        pairs = zip(self.chunks(name), self.chunks(other), strict=True)
        return len(one.shape) > 0 and all(torch.equal(left, right) for left, right in pairs)

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._entries[self._stored_name(name)].path

    def _chunks(self, name: str, part: tuple[slice, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of a tensor's first dimension, and their part of it."""
        stored_name = self._stored_name(name)
        entry = self._entries[stored_name]
        first, end, _ = part[0].indices(entry.shape[0])
        row_shape = (
            len(range(*columns.indices(size)))
            for columns, size in zip(part[1:], entry.shape[1:], strict=True)
        )
        row_bytes = math.prod(row_shape) * ITEM_BYTES[entry.dtype]
        height = max(1, _CHUNK_BYTES // max(1, row_bytes))
        try:
            tensor = self._opened(entry.path).get_slice(stored_name)
            for low in range(first, end, height):
                rows = slice(low, min(low + height, end))
                yield rows, tensor[(rows, *part[1:])]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{entry.path}: tensor {name} cannot be read: {first_line(error)}."
            ) from None

    def _stored_name(self, name: str) -> str:
        """Return a tensor's name in the files; a model saved without its head lacks the prefix."""
        if name in self._entries:
            return name
        return self._stored_names.get(name, name.partition(".")[2])

    def _check_shard(self, shard: WeightShard) -> None:
        entry = self._entries.get(self._stored_name(shard.name))
        if entry is None:
            raise CheckpointError(f"{self._folder}: tensor {shard.name} is missing.")
        if entry.shape != shard.shape:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} has shape {list(entry.shape)}, but config.json "
                f"requires {list(shard.shape)}."
            )
        if entry.dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} has dtype {entry.dtype}; supported are "
                f"{', '.join(ITEM_BYTES)}."
            )

    def _opened(self, path: Path) -> Any:  # Any: safetensors has no types
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


def _stored_names(names: Iterable[str], text_tensors: TextTensors | None) -> dict[str, str]:
    """Return which tensor is stored as what, for those with a prefix of multimodal models."""
    prefixes = text_tensors.prefixes if text_tensors is not None else ()
    return {
        replacement + name.removeprefix(prefix): name
        for name in names
        for prefix, replacement in prefixes
        if name.startswith(prefix)
    }
