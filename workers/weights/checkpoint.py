"""The tensors of a checkpoint: whether they fit the model, and a rank's parts of them.

The folder is not trusted: missing, unexpected, corrupt or misshapen tensors raise a
CheckpointError of one line. Only safetensors files are opened, never pickles.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import defaultdict
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pagedray.errors import CheckpointError
from pagedray.text import pluralize
from pagedray.weight_format import CacheScales
from workers.layers.formats.fp8_weight import quantized_rows
from workers.layers.formats.mxfp4 import SCALE
from workers.weights.tensor_entries import (
    ITEM_BYTES,
    TensorEntry,
    gguf_link,
    read_entries,
    shown_name,
)
from workers.weights.tensor_reader import FileRange, TensorReader, tensor_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from pagedray.config import EngineConfig
    from pagedray.model_config import ModelConfig, TextTensors
    from workers.layers.weight import WeightShard

__all__ = [
    "HEAD_NAME",
    "Checkpoint",
    "as_numbers",
    "device_of",
    "quantize_to",
    "with_cache_format",
    "write_rows",
]

logger = logging.getLogger(__name__)

HEAD_NAME = "lm_head.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")
# The stored dtypes of a target of other dtypes, which are not converted.
_STORED_AS: dict[torch.dtype, tuple[str, ...]] = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
    torch.int8: ("I8",),
    torch.uint8: ("U8",),
    # As bytes.
    SCALE: ("U8",),
}
_PROJECTIONS = {"k_scale": "k_proj", "v_scale": "v_proj"}
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
        self._entries = _entries(folder)
        self._skipped = text_tensors.skipped if text_tensors is not None else ()
        self._stored_names = _stored_names(self._entries, text_tensors)
        """The stored name of each tensor that a multimodal model stores under another name."""
        self._reader = TensorReader()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) in self._entries

    def check_tensors(self, shards: Iterable[WeightShard], *, has_spare_head: bool) -> None:
        """Raise CheckpointError unless the folder has exactly these tensors, in their shapes.

        With `has_spare_head` it may also have an output head, which the model does not read.
        Tensors of other modalities, and others that the text part does not use, are skipped.
        """
        names = set()
        for shard in shards:
            names.add(self._stored_name(shard.name))
            self._check_shard(shard)
        if has_spare_head:
            names.update((HEAD_NAME, self._stored_names.get(HEAD_NAME, HEAD_NAME)))
            names.update(f"{HEAD_NAME}_{part}" for part in ("packed", "scale", "minimum"))
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
            logger.info("Skipped %s in %s", pluralize(num_skipped, "unused tensor"), self._folder)

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""
        with device_of(shard):
            for rows, chunk in self.copies(shard):
                write_rows(shard, rows, chunk)

    def copies(self, shard: WeightShard) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield rows of a shard's target, and the stored values that `fill_shard` writes to them.

        They are there already if both are in the same memory. Otherwise the next chunk overwrites
        the memory of a chunk.
        """
        first, _, _ = shard.part[0].indices(shard.shape[0])
        for rows, chunk in self._chunks(shard.name, shard.part, shard.target):
            yield slice(rows.start - first, rows.stop - first), chunk

    def chunks(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the rows of a whole tensor, as stored; the next rows overwrite their memory."""
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

    @property
    def folder(self) -> Path:
        """The folder that it was opened for."""
        return self._folder

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[self._stored_name(name)].shape

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._entries[self._stored_name(name)].path

    def in_file_order(self, shards: Iterable[WeightShard]) -> list[WeightShard]:
        """Return the shards in the order in which their tensors are stored."""

        def place(shard: WeightShard) -> tuple[Path, int]:
            entry = self._entries[self._stored_name(shard.name)]
            return entry.path, entry.first_byte

        return sorted(shards, key=place)

    def read_ahead(self, shards: Iterable[WeightShard]) -> None:
        """Ask the kernel to read the data of these shards in advance, in this order."""
        self._reader.read_ahead([self._file_range(shard) for shard in shards])

    def file_digests(self) -> dict[str, str]:
        """Return a digest of the tensors of each file, by its name."""
        digests: defaultdict[str, bytearray] = defaultdict(bytearray)
        for name, entry in sorted(self._entries.items()):
            with _named_in_errors(entry, name):
                digests[entry.path.name] += tensor_digest(name, entry, self._reader)
        return {file: hashlib.sha256(parts).hexdigest() for file, parts in digests.items()}

    def _file_range(self, shard: WeightShard) -> FileRange:
        entry = self._entries[self._stored_name(shard.name)]
        with _named_in_errors(entry, shard.name):
            return self._reader.file_range(entry, shard.part)

    def _chunks(
        self, name: str, part: tuple[slice, ...], target: torch.Tensor | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of a tensor's first dimension, and their part of it."""
        entry = self._entries[self._stored_name(name)]
        with _named_in_errors(entry, name):
            yield from self._reader.chunks(entry, part, target)

    def _stored_name(self, name: str) -> str:
        """Return the name in the files, or that of a missing tensor."""
        for spelling in (name, *_spellings_of_scale(name)):
            if spelling in self._entries:
                return spelling
            if spelling in self._stored_names:
                return self._stored_names[spelling]
        return name.partition(".")[2]

    def _check_shard(self, shard: WeightShard) -> None:
        entry = self._entries.get(self._stored_name(shard.name))
        if entry is None:
            raise CheckpointError(f"{self._folder}: tensor {shard.name} is missing.")
        if entry.shape != shard.shape:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} has shape {list(entry.shape)}, but config.json "
                f"requires {list(shard.shape)}."
            )
        allowed: tuple[str, ...] = _FLOATS
        if shard.scales is None:
            allowed = _STORED_AS.get(shard.target.dtype, _FLOATS)
        if entry.dtype not in allowed:
            raise CheckpointError(
                f"{entry.path}: tensor {shard.name} has dtype {entry.dtype}; supported dtypes are "
                f"{', '.join(allowed)}."
            )


def _entries(folder: Path) -> Mapping[str, TensorEntry]:
    gguf = gguf_link(folder)
    if gguf is None:
        return read_entries(folder)
    # The library is imported only for such a folder.
    from workers.weights.gguf_tensors import GgufModel

    return GgufModel.read(gguf).entries()


@contextmanager
def _named_in_errors(entry: TensorEntry, name: str) -> Iterator[None]:
    """Raise CheckpointError, which names the tensor, for an OSError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{entry.path}: tensor {name} cannot be read: {error.strerror}."
        ) from None


def device_of(shard: WeightShard) -> AbstractContextManager[object]:
    """Make the GPU of a shard, if any, the current one of this thread, for pinned memory."""
    device = shard.target.device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _spellings_of_scale(name: str) -> Iterator[str]:
    """Yield other names of a layer's scale of keys or values, as libraries store them."""
    attention, _, scale = name.rpartition(".")
    if projection := _PROJECTIONS.get(scale):
        yield f"{attention}.{projection}.{scale}"
        yield f"{attention}.{projection}.output_scale"
        # AutoFP8 stores the larger one of the two for both.
        yield f"{attention}.kv_scale"


def _stored_names(names: Iterable[str], text_tensors: TextTensors | None) -> dict[str, str]:
    """Return the stored name of each tensor with a prefix of multimodal models."""
    prefixes = text_tensors.prefixes if text_tensors is not None else ()
    return {
        replacement + name.removeprefix(prefix): name
        for name in names
        for prefix, replacement in prefixes
        if name.startswith(prefix)
    }


def as_numbers(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that are stored for a target of a dtype: exponents are bytes."""
    return stored.view(SCALE) if dtype == SCALE else stored


def write_rows(shard: WeightShard, rows: slice, stored: torch.Tensor) -> None:
    """Write `stored` to these rows of the target, in its dtype, unless it is there already."""
    target = shard.target[rows]
    if shard.scales is not None:
        quantize_to(target, shard.scales[rows], stored)
    elif stored.data_ptr() != target.data_ptr():
        target.copy_(as_numbers(stored, target.dtype))


def quantize_to(target: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
    """Quantize rows, and write their values and their scales, `[num_rows, 1]`."""
    values, row_scales = quantized_rows(rows)
    target.copy_(values)
    scales.copy_(row_scales)


def with_cache_format(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a model that knows its cache. Raises CheckpointError."""
    dtype = config.cache.kv_cache_dtype
    model = replace(config.model, kv_cache_dtype=dtype)
    matrix_dtype = config.cache.mamba_ssm_cache_dtype
    if model.recurrent is not None and matrix_dtype != "auto":
        model = replace(model, recurrent=replace(model.recurrent, matrix_dtype=matrix_dtype))
    has_scales = model.quantization is not None and model.quantization.has_cache_scales
    if has_scales and dtype == "auto":
        logger.info(
            "The checkpoint has scales for an fp8 cache, which --kv-cache-dtype fp8_e4m3 uses."
        )
    elif has_scales and config.load_format != "dummy":
        model = replace(model, cache_scales=_stored_scales(model))
    return replace(config, model=model)


def _stored_scales(model: ModelConfig) -> tuple[CacheScales, ...]:
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        return tuple(
            CacheScales(*(_scale(checkpoint, name) for name in model.cache_scale_names(layer)))
            for layer in range(model.num_layers)
        )


def _scale(checkpoint: Checkpoint, name: str) -> float:
    if name not in checkpoint:
        raise CheckpointError(f"{checkpoint.folder}: tensor {name} is missing.")
    chunks = list(checkpoint.chunks(name)) if checkpoint.shape_of(name) == (1,) else []
    if not chunks:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name} has shape "
            f"{list(checkpoint.shape_of(name))}, but a scale of an fp8 cache has [1]."
        )
    scale = float(chunks[0])
    if not 0 < scale < math.inf:
        raise CheckpointError(
            f"{checkpoint.path_of(name)}: tensor {name} is {scale}, but a scale of an fp8 cache "
            "must be positive and finite."
        )
    return scale
