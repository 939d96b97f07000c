"""Loads of a checkpoint, by ranks in processes of their own.

A spawned process finds functions here: those of `__main__.py` in a package cannot be sent to it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from bench.loading.cached_files import set_cached
from pagedray.config import EngineConfig, ParallelConfig
from tests.workers.lone_rank import LoneRank
from workers.layers.weight import CompositeLayer
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.weights.load_weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from workers.layers.weight import Layer

__all__ = ["Load", "load_by_ranks"]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load by one rank."""

    read_s: float
    load_s: float
    peak_bytes: int
    weight_bytes: int


class _TimedModel(CompositeLayer):
    """A model, and when its tensors had been read."""

    def __init__(self, model: Layer) -> None:
        self._model = model
        self.read_at_s = 0.0

    def sublayers(self) -> Iterator[Layer]:
        yield self._model

    def finalize(self) -> None:
        self.read_at_s = time.perf_counter()
        super().finalize()


def load_by_ranks(folder: Path, files: list[Path], num_ranks: int, *, is_cold: bool) -> list[Load]:
    """Load in as many processes as ranks, which begin together."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_ranks)]
    processes = [
        context.Process(target=_load, args=(folder, rank, num_ranks, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        ours.recv()
    set_cached(files, is_cold=is_cold)
    for ours, _ in pipes:
        ours.send(None)
    loads = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return loads


def _load(folder: Path, rank: int, num_ranks: int, pipe: Connection[Any, Any]) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    config = EngineConfig(
        model=read_model_config(folder, dtype="bfloat16"),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, device="cpu"),
    )
    before_bytes = _status_bytes("VmRSS")
    model = Decoder(
        config.model,
        LoneRank(rank, num_ranks),
        backend=TorchSDPABackend,
        device=torch.device("cpu"),
    )
    weight_bytes = sum(shard.target.nbytes for shard in model.weight_shards())
    timed = _TimedModel(model)
    pipe.send(None)
    pipe.recv()
    started_s = time.perf_counter()
    load_weights(timed, config)
    ended_s = time.perf_counter()
    pipe.send(
        Load(
            read_s=timed.read_at_s - started_s,
            load_s=ended_s - started_s,
            peak_bytes=_status_bytes("VmHWM") - before_bytes,
            weight_bytes=weight_bytes,
        )
    )


def _status_bytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
