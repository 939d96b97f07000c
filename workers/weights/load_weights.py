"""Loads a rank's part of each tensor: from a checkpoint, or dummy weights."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from attention.kernels.cpu.finite_copy import are_finite, copy_finite
from pagedray.errors import CheckpointError
from pagedray.machine import num_usable_cores
from workers.layers.formats.fp8_weight import FP8
from workers.layers.formats.mxfp4 import SCALE
from workers.weights.checkpoint import (
    HEAD_NAME,
    Checkpoint,
    as_numbers,
    device_of,
    quantize_to,
    write_rows,
)
from workers.weights.tensor_entries import gguf_link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagedray.config import EngineConfig
    from workers.layers.weight import Layer, WeightShard

__all__ = [
    "DummyTensors",
    "FiniteTensors",
    "fill_shards",
    "load_weights",
    "with_stored_experts",
    "with_stored_head",
]

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
# Of a tensor that one thread loads at a time, so that all threads have work until the end.
_PIECE_BYTES = 2**25
_CHUNK_ELEMENTS = 2**22
_STANDARD_DEVIATION = 0.02
_NAN_BITS = {FP8: 0x7F, SCALE: 0xFF}
"""The bits that are all set in NaN alone."""


class TensorSource(Protocol):
    """A source of weights."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""


def load_weights(
    model: Layer, config: EngineConfig, report_progress: Callable[[int, int], None] | None = None
) -> dict[str, str]:
    """Load a model and make it ready to run; return a digest of each file that has its tensors.

    `report_progress` is called with the number of tensors loaded, and of all tensors. Raises
    CheckpointError.
    """
    with torch.inference_mode():
        # Drop all other references to the weights, so that packing frees the originals.
        digests = _read_weights(list(model.weight_shards()), config, report_progress)
        model.finalize()
    return digests


def _read_weights(
    shards: Sequence[WeightShard],
    config: EngineConfig,
    report_progress: Callable[[int, int], None] | None,
) -> dict[str, str]:
    if config.load_format == "dummy":
        fill_shards(shards, DummyTensors(config.load_seed), report_progress)
        return {}
    started_s = time.perf_counter()
    with Checkpoint(config.model.folder, config.model.text_tensors) as checkpoint:
        checkpoint.check_tensors(
            shards, has_spare_head=config.model.has_tied_embeddings or config.model.pools
        )
        tensors = FiniteTensors(checkpoint)
        in_order = checkpoint.in_file_order(shards)
        checkpoint.read_ahead(in_order)
        fill_shards(in_order, tensors, report_progress, num_threads=_num_threads(config))
        tensors.raise_if_not_finite()
        # The data just read is in the page cache.
        digests = checkpoint.file_digests()
    gigabytes = sum(shard.target.nbytes for shard in shards) / 1e9
    duration_s = time.perf_counter() - started_s
    logger.info(
        "Loaded %.2f GB of weights in %.1f s, %.2f GB/s",
        gigabytes,
        duration_s,
        gigabytes / duration_s,
    )
    return digests


def fill_shards(
    shards: Sequence[WeightShard],
    source: TensorSource,
    report_progress: Callable[[int, int], None] | None = None,
    *,
    num_threads: int = 1,
) -> None:
    """Load every shard from a source, with several threads if it allows that."""

    def fill(piece: WeightShard) -> None:
        # The mode is that of a thread.
        with torch.inference_mode():
            if piece.target.numel():
                source.fill_shard(piece)

    report = report_progress or _ignore_progress
    if num_threads == 1:
        for done, shard in enumerate(shards):
            report(done, len(shards))
            fill(shard)
    else:
        pieces = [(piece, done) for done, shard in enumerate(shards) for piece in _pieces(shard)]
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="pagedray-load")
        try:
            filled = pool.map(fill, [piece for piece, _ in pieces])
            for _, (_, done) in zip(filled, pieces, strict=True):
                report(done, len(shards))
        finally:
            pool.shutdown(cancel_futures=True)
    report(len(shards), len(shards))


def _pieces(shard: WeightShard) -> Iterator[WeightShard]:
    """Yield shards that together equal `shard`, cut along its first dimension if it is large."""
    if shard.target.nbytes <= _PIECE_BYTES:
        yield shard
        return
    num_rows = len(shard.target)
    height = max(1, num_rows * _PIECE_BYTES // shard.target.nbytes)
    start, _, _ = shard.part[0].indices(shard.shape[0])
    for first in range(0, num_rows, height):
        target = shard.target[first : first + height]
        rows = slice(start + first, start + first + len(target))
        scales = None if shard.scales is None else shard.scales[first : first + height]
        yield replace(shard, part=(rows, *shard.part[1:]), target=target, scales=scales)


def _ignore_progress(done: int, total: int) -> None:
    pass


def _num_threads(config: EngineConfig) -> int:
    """Return the number of threads that load weights; a single thread may be too slow."""
    if config.parallel.device == "cpu":
        return min(_MAX_THREADS, torch.get_num_threads())
    share = num_usable_cores() // config.parallel.tensor_parallel_size
    return max(1, min(_MAX_THREADS, share))


class DummyTensors:
    """Random numbers by seed, name and position alone, equal for any number of ranks.

    They are generated on the target's device, and differ between device types.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part: the shard's dummy value, or a normal distribution."""
        if shard.dummy is not None:
            shard.target.fill_(shard.dummy)
            return
        first, end, _ = shard.part[0].indices(shard.shape[0])
        for rows, chunk in self._chunks(shard, first, end):
            low, high = max(rows.start, first), min(rows.stop, end)
            part = chunk[low - rows.start : high - rows.start][(slice(None), *shard.part[1:])]
            write_rows(shard, slice(low - first, high - first), part)

    def _chunks(
        self, shard: WeightShard, first: int, end: int
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of the first dimension and their numbers; all ranks chunk alike."""
        num_rows, row_shape = shard.shape[0], shard.shape[1:]
        height = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(row_shape).numel()))
        device = shard.target.device
        generator = torch.Generator(device)
        for index in range(first // height, -(-end // height)):
            rows = slice(index * height, min(num_rows, (index + 1) * height))
            generator.manual_seed(self._seed_of(shard.name, index))
            dtype = shard.target.dtype
            shape = (rows.stop - rows.start, *row_shape)
            if dtype.is_floating_point:
                # Torch has no random numbers in fp8.
                made = torch.bfloat16 if dtype == FP8 else dtype
                chunk = torch.empty(shape, dtype=made, device=device)
                yield rows, chunk.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
            else:
                chunk = torch.empty(shape, dtype=dtype, device=device)
                yield rows, chunk.random_(generator=generator)

    def _seed_of(self, name: str, index: int) -> int:
        digest = hashlib.sha256(f"{self._seed}/{name}/{index}".encode()).digest()
        return int.from_bytes(digest[:7])


class FiniteTensors:
    """The tensors of a checkpoint, each checked once when it is loaded, by any thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._sums: list[tuple[WeightShard, torch.Tensor]] = []
        """A number for each shard, on its device: finite if all values are."""

    def fill_shard(self, shard: WeightShard) -> None:
        """Write this rank's part of a tensor to the shard's target, converted to its dtype."""
        with device_of(shard):
            sums = [_copied(shard, *copy) for copy in self._checkpoint.copies(shard)]
        self._sums.append((shard, torch.stack(sums).sum()))

    def raise_if_not_finite(self) -> None:
        """Raise CheckpointError for the first tensor that has NaN or infinite values."""
        if not self._sums:
            return
        # A GPU is waited for only here, not after each tensor.
        are_finite = torch.stack([total for _, total in self._sums]).isfinite().tolist()
        for (shard, _), is_finite in zip(self._sums, are_finite, strict=True):
            # Large values may add up to infinity.
            if not is_finite and not _is_finite(shard):
                raise self._error(shard)

    def _error(self, shard: WeightShard) -> CheckpointError:
        path = self._checkpoint.path_of(shard.name)
        num_stored = num_converted = 0
        for stored in self._checkpoint.chunks(shard.name):
            chunk = as_numbers(stored, shard.target.dtype)
            num_stored += _count(chunk)
            num_converted += _count(chunk.to(shard.target.dtype))
        if num_stored:
            return CheckpointError(
                f"{path}: tensor {shard.name} has {_values(num_stored)} NaN or infinite; "
                "download or export the checkpoint again."
            )
        dtype = str(shard.target.dtype).removeprefix("torch.")
        return CheckpointError(
            f"{path}: tensor {shard.name} has {_values(num_converted)} beyond the range of "
            f"{dtype}; use another --dtype."
        )


def _copied(shard: WeightShard, rows: slice, source: torch.Tensor) -> torch.Tensor:
    """Write `source` to these rows of the shard's target, unless it is there.

    Returns a number that is finite only if all values are.
    """
    target = shard.target[rows]
    if shard.scales is not None:
        scales = shard.scales[rows]
        quantize_to(target, scales, source)
        return scales.sum()
    if target.dtype in _NAN_BITS or not target.is_floating_point():
        write_rows(shard, rows, source)
        return _zero_if_finite(target)
    is_there = source.data_ptr() == target.data_ptr()
    is_finite = are_finite(target) if is_there else copy_finite(target, source)
    if is_finite is not None:
        return target.new_full((), 0.0 if is_finite else math.nan)
    if not is_there:
        target.copy_(source)
    # A sum is NaN or infinite if one of its values is, and is faster than `isfinite`.
    return target.sum()


def _zero_if_finite(values: torch.Tensor) -> torch.Tensor:
    """Return 0, or NaN if a value of 8 bits is NaN; these dtypes have no infinity."""
    zero = torch.zeros((), device=values.device)
    if values.dtype not in _NAN_BITS:
        return zero
    bits = _NAN_BITS[values.dtype]
    has_nan = (values.view(torch.uint8) & bits).eq(bits).any()
    return zero.masked_fill(has_nan, math.nan)


def _is_finite(shard: WeightShard) -> bool:
    values = shard.scales if shard.scales is not None else shard.target
    if values.dtype in _NAN_BITS:
        return bool(_zero_if_finite(values).isfinite())
    # With a NaN, both are NaN. A single pass without a temporary, unlike `isfinite`.
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


def _count(chunk: torch.Tensor) -> int:
    return int((~chunk.float().isfinite()).sum())


def _values(number: int) -> str:
    return "1 value that is" if number == 1 else f"{number} values that are"


def with_stored_head(config: EngineConfig) -> EngineConfig:
    """Return the configuration, untied if the checkpoint has a head that is not its embedding.

    Transformers 5 does the same. Raises CheckpointError.
    """
    model = config.model
    is_gguf = gguf_link(model.folder) is not None
    if not model.has_tied_embeddings or config.load_format == "dummy" or is_gguf:
        return config
    embedding = f"{model.names.embedding}.weight"
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        has_both = HEAD_NAME in checkpoint and embedding in checkpoint
        if not has_both or checkpoint.are_equal(HEAD_NAME, embedding):
            return config
    logger.warning(
        "config.json ties %s to the embedding, but the checkpoint stores different values, which "
        "are used; set tie_word_embeddings to false to silence this.",
        HEAD_NAME,
    )
    return replace(config, model=replace(model, has_tied_embeddings=False))


def with_stored_experts(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the names of the stacks, if the checkpoint has them.

    Raises CheckpointError.
    """
    model = config.model
    stacked = model.stacked_names
    if stacked is None or config.load_format == "dummy":
        return config
    layers = [layer for layer in range(model.num_layers) if model.experts_of(layer) is not None]
    names = [f"{stacked.decoder_layer.format(layer)}.{stacked.expert_output}" for layer in layers]
    with Checkpoint(model.folder, model.text_tensors) as checkpoint:
        if not any(name in checkpoint for name in names):
            return config
    return replace(config, model=replace(model, names=stacked, stacked_names=None))
