"""How fast ranks load a checkpoint on a CPU, beside a plain copy of its files.

    python -m bench.loading --folder /tmp/checkpoint --output bench/results/loading.json

A sharded checkpoint of random values is written to the folder, unless one is there. A copy is `cp`
of its files to /dev/shm, which is memory as weights are; `discard_s` is `cat` of them to /dev/null,
which writes nothing. A load reads, checks and converts all tensors of a rank, in a process that has
built the model; then `read_s` ends, and the weights are packed for the CPU's GEMM. With two ranks,
it ends when both have ended. Cold files are not in the page cache. All take turns, and times are
the best over rounds, since other programs only add to them. `memory` is the most that the ranks
together used beyond what they had before they built the model, relative to the weights.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from bench.engine import LLAMA_8B, write_results
from bench.engine.random_checkpoint import write_checkpoint
from pagedray.config import EngineConfig, ParallelConfig
from workers.layers.weight import CompositeLayer
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from workers.layers.weight import Layer

SHAPE: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "vocab_size": 32000,
}
_STATUS = Path("/proc/self/status")
_CAT = shutil.which("cat") or "cat"
_CP = shutil.which("cp") or "cp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Loads by one number of ranks, of files that are or are not in the page cache."""

    num_ranks: int
    is_cold: bool
    gigabytes: float
    discard_s: float
    copy_s: float
    read_s: float
    load_s: float
    """With the packing of the weights."""
    read_ratio: float
    """The speed of reading, relative to that of the copy."""
    discard_ratio: float
    """Relative to that of `cat`."""
    load_ratio: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load by one rank."""

    read_s: float
    load_s: float
    peak_bytes: int
    weight_bytes: int


class _Rank(SoloGroup):
    """A rank of a group that never communicates."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank = rank
        self.size = size


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


def main() -> int:
    """Copy and load in turns, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, is kept")
    parser.add_argument("--num-layers", type=int, default=6, help="of a new checkpoint (6)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, SHAPE | {"num_hidden_layers": options.num_layers})
    files = sorted(folder.glob("*.safetensors"))
    gigabytes = sum(path.stat().st_size for path in files) / 1e9
    discards: dict[bool, list[float]] = {True: [], False: []}
    copies: dict[bool, list[float]] = {True: [], False: []}
    loads: dict[tuple[int, bool], list[list[Load]]] = {}
    for _ in range(options.rounds):
        for is_cold in (True, False):
            _set_cached(files, is_cold=is_cold)
            discards[is_cold].append(_discard_s(files))
            _set_cached(files, is_cold=is_cold)
            copies[is_cold].append(_copy_s(files))
            for num_ranks in (1, 2):
                loaded = _loaded(folder, files, num_ranks, is_cold=is_cold)
                loads.setdefault((num_ranks, is_cold), []).append(loaded)
                print(
                    f"cold: {is_cold}, discard {discards[is_cold][-1]:.2f} s, copy "
                    f"{copies[is_cold][-1]:.2f} s, {num_ranks} ranks: "
                    f"{max(load.read_s for load in loaded):.2f} s, with packing "
                    f"{max(load.load_s for load in loaded):.2f} s",
                    flush=True,
                )
    rows = [
        _row(
            rounds,
            num_ranks=num_ranks,
            is_cold=is_cold,
            gigabytes=gigabytes,
            discard_s=min(discards[is_cold]),
            copy_s=min(copies[is_cold]),
        )
        for (num_ranks, is_cold), rounds in loads.items()
    ]
    for row in rows:
        print(
            f"{'cold' if row.is_cold else 'warm'}, {row.num_ranks} ranks: discard "
            f"{gigabytes / row.discard_s:.2f} GB/s, copy "
            f"{gigabytes / row.copy_s:.2f} GB/s, read {gigabytes / row.read_s:.2f} GB/s "
            f"({row.read_ratio:.2f}), with packing {gigabytes / row.load_s:.2f} GB/s "
            f"({row.load_ratio:.2f}), memory {row.memory:.3f}"
        )
    if options.output is not None:
        write_results(options.output, f"{gigabytes:.1f} GB in {len(files)} files", rows=rows)
    return 0


def _row(
    rounds: list[list[Load]],
    *,
    num_ranks: int,
    is_cold: bool,
    gigabytes: float,
    discard_s: float,
    copy_s: float,
) -> Row:
    read_s = min(max(load.read_s for load in ranks) for ranks in rounds)
    load_s = min(max(load.load_s for load in ranks) for ranks in rounds)
    memory = max(
        sum(load.peak_bytes for load in ranks) / sum(load.weight_bytes for load in ranks)
        for ranks in rounds
    )
    return Row(
        num_ranks=num_ranks,
        is_cold=is_cold,
        gigabytes=round(gigabytes, 2),
        discard_s=round(discard_s, 3),
        copy_s=round(copy_s, 3),
        read_s=round(read_s, 3),
        load_s=round(load_s, 3),
        read_ratio=round(copy_s / read_s, 2),
        discard_ratio=round(discard_s / read_s, 2),
        load_ratio=round(copy_s / load_s, 2),
        memory=round(memory, 3),
    )


def _discard_s(files: list[Path]) -> float:
    started_s = time.perf_counter()
    with Path(os.devnull).open("wb") as sink:
        subprocess.run([_CAT, *files], stdout=sink, check=True)
    return time.perf_counter() - started_s


def _copy_s(files: list[Path]) -> float:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        started_s = time.perf_counter()
        subprocess.run([_CP, *files, folder], check=True)
        return time.perf_counter() - started_s


def _set_cached(files: list[Path], *, is_cold: bool) -> None:
    """Drop the files from the page cache, or read them into it."""
    if not is_cold:
        _discard_s(files)
        return
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _loaded(folder: Path, files: list[Path], num_ranks: int, *, is_cold: bool) -> list[Load]:
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
    _set_cached(files, is_cold=is_cold)
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
        config.model, _Rank(rank, num_ranks), backend=TorchSDPABackend, device=torch.device("cpu")
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


if __name__ == "__main__":
    sys.exit(main())
