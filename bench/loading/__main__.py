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
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine import LLAMA_8B, write_results
from bench.engine.random_checkpoint import write_checkpoint
from bench.loading.cached_files import copy_files, discard_files, set_cached
from bench.loading.loads import Load, load_by_ranks

SHAPE: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "vocab_size": 32000,
}


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


def main() -> int:
    """Copy and load in turns, print a table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loading", description=__doc__.splitlines()[0] if __doc__ else None
    )
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
            set_cached(files, is_cold=is_cold)
            discards[is_cold].append(discard_files(files))
            set_cached(files, is_cold=is_cold)
            copies[is_cold].append(copy_files(files))
            for num_ranks in (1, 2):
                loaded = load_by_ranks(folder, files, num_ranks, is_cold=is_cold)
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


if __name__ == "__main__":
    sys.exit(main())
