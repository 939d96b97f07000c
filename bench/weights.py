"""How long one rank loads weights on a CPU, and how much of that is the check of their values.

    python -m bench.weights --folder /tmp/checkpoint --output bench/results/weights.json

A checkpoint of random values is written to the folder, unless one is there; it is in the page
cache then. A load copies all tensors to a new model; `checked` also finds values that are not
finite, as `load_weights` does, and `plain` does not. The two take turns, with one and with all
threads of torch. Times are the best over rounds, since other programs only add to them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from bench.engine import LLAMA_8B, write_results
from bench.engine.random_checkpoint import write_checkpoint
from pagedray.model_config import Dtype
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import FiniteTensors, fill_shards

SHAPE: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Loads of one checkpoint to one dtype."""

    dtype: Dtype
    num_threads: int
    gigabytes: float
    """Read from the checkpoint, whose values are bfloat16."""
    plain_s: float
    checked_s: float
    ratio: float


def main() -> int:
    """Load with and without the check, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, is kept")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, SHAPE)
    gigabytes = sum(len(path.read_bytes()) for path in folder.glob("*.safetensors")) / 1e9
    rows = []
    for num_threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(num_threads)
        for dtype in DTYPES:
            rounds = [_round(folder, dtype) for _ in range(options.rounds)]
            plain_s, checked_s = map(min, zip(*rounds, strict=True))
            row = Row(
                dtype=dtype,
                num_threads=num_threads,
                gigabytes=round(gigabytes, 2),
                plain_s=round(plain_s, 3),
                checked_s=round(checked_s, 3),
                ratio=round(checked_s / plain_s, 2),
            )
            rows.append(row)
            print(
                f"{dtype:8} {num_threads} threads: plain {row.plain_s:.3f} s "
                f"({gigabytes / row.plain_s:.2f} GB/s), checked {row.checked_s:.3f} s, "
                f"{row.ratio:.2f} times",
                flush=True,
            )
    if options.output is not None:
        write_results(options.output, "0.7 billion parameters", rows=rows)
    return 0


def _round(folder: Path, dtype: Dtype) -> tuple[float, float]:
    """Return the seconds of a plain and of a checked load."""
    return _load_s(folder, dtype, is_checked=False), _load_s(folder, dtype, is_checked=True)


def _load_s(folder: Path, dtype: Dtype, *, is_checked: bool) -> float:
    config = read_model_config(folder, dtype=dtype)
    device = torch.device("cpu")
    model = Decoder(config, SoloGroup(), backend=TorchSDPABackend, device=device)
    shards = list(model.weight_shards())
    with torch.inference_mode(), Checkpoint(folder) as checkpoint:
        started_s = time.perf_counter()
        if is_checked:
            tensors = FiniteTensors(checkpoint)
            fill_shards(shards, tensors, num_threads=torch.get_num_threads())
            tensors.raise_if_not_finite()
        else:
            fill_shards(shards, checkpoint, num_threads=torch.get_num_threads())
        return time.perf_counter() - started_s


if __name__ == "__main__":
    sys.exit(main())
