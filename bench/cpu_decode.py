"""Bandwidth of paged decode attention on a CPU, compared with a plain memory copy.

    python -m bench.cpu_decode --output bench/results/cpu_decode.json

Both run in turns in one process. The copy reads as many bytes as the decode and writes them; its
rate counts the bytes read. The KV cache is larger than the CPU caches, and its blocks are in random
order.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.abstract import AttentionBatch, AttentionParams, AttentionSpec
from attention.cache import kv_cache_shape
from attention.layer import Attention
from attention.params import storage_dtype
from attention.selector import select_backend
from bench.records.command import command_and_date
from bench.records.machine import cpu_and_cores

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = (
    # Sequences, keys, query heads, KV heads, head size, layers.
    (32, 512, 8, 4, 64, 8),
    (16, 1024, 32, 8, 128, 2),
    (1, 8192, 32, 8, 128, 4),
)
BLOCK_SIZE = 16
CACHES = (
    (torch.float32, "auto"),
    (torch.bfloat16, "auto"),
    (torch.bfloat16, "fp8_e4m3"),
    (torch.bfloat16, "fp8_e5m2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    shape: str
    dtype: str
    """Of the cache; queries are bfloat16 where it is fp8."""
    decode: float
    """GB/s of keys and values, median over rounds."""
    copy: float
    """GB/s read by the copy."""
    ratio: float
    target: float | None
    """None for fp8, a byte of which is as much work as two of bfloat16."""


def main() -> int:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [
        _measure(case, dtype, kv_cache_dtype, options.rounds)
        for dtype, kv_cache_dtype in CACHES
        for case in CASES
    ]
    print("| sequences x keys, heads | dtype | decode GB/s | copy GB/s | ratio | target |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.shape} | {row.dtype} | {row.decode:.1f} | {row.copy:.1f} | "
            f"{row.ratio:.2f} | {row.target} |"
        )
    if options.output:
        _write(options.output, rows)
    return 0


@torch.inference_mode()
def _measure(case: tuple[int, ...], dtype: torch.dtype, kv_cache_dtype: str, rounds: int) -> Row:
    num_sequences, num_keys, num_heads, num_kv_heads, head_size, num_layers = case
    params = AttentionParams(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        kv_cache_dtype=kv_cache_dtype,
    )
    spec = AttentionSpec(
        layers=(params,) * num_layers,
        dtype=dtype,
        device=torch.device("cpu"),
        block_size=BLOCK_SIZE,
    )
    backend = select_backend("auto", spec)
    layers = [Attention(params, layer_index=i, backend=backend) for i in range(num_layers)]
    batch = _decodes(num_sequences, num_keys)
    shape = kv_cache_shape(
        num_blocks=batch.block_tables.size,
        num_layers=num_layers,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
    )
    cache = torch.randn(shape).to(spec.cache_dtype).view(storage_dtype(spec.cache_dtype))
    query = torch.randn(num_sequences, num_heads * head_size).to(dtype)
    key = torch.randn(num_sequences, num_kv_heads * head_size).to(dtype)
    metadata = backend.make_metadata_builder(spec).build(batch)

    def decode() -> None:
        for layer in layers:
            layer(query, key, key, cache, metadata)

    source, target = torch.empty_like(cache), torch.empty_like(cache)
    source.fill_(1)
    num_bytes = cache.nbytes
    rates = []
    for index in range(rounds + 1):
        seconds = _seconds(decode), _seconds(lambda: target.copy_(source))
        # The first round warms up.
        if index:
            rates.append([num_bytes / s / 1e9 for s in seconds])
    row = Row(
        shape=f"{num_sequences} x {num_keys}, {num_heads}/{num_kv_heads} of {head_size}",
        dtype=str(spec.cache_dtype).removeprefix("torch."),
        decode=statistics.median(rate for rate, _ in rates),
        copy=statistics.median(rate for _, rate in rates),
        ratio=statistics.median(rate / other for rate, other in rates),
        target=0.5 if kv_cache_dtype == "auto" else None,
    )
    print(row, file=sys.stderr)
    return row


def _decodes(num_sequences: int, num_keys: int) -> AttentionBatch:
    width = -(-num_keys // BLOCK_SIZE)
    blocks = np.random.default_rng(0).permutation(num_sequences * width)
    tables = blocks.reshape(num_sequences, width).astype(np.int32)
    last = num_keys - 1
    return AttentionBatch(
        num_prefills=0,
        query_lens=np.ones(num_sequences, dtype=np.int32),
        seq_lens=np.full(num_sequences, num_keys, dtype=np.int32),
        block_tables=tables,
        slot_mapping=tables[:, last // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        + last % BLOCK_SIZE,
    )


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _write(path: Path, rows: list[Row]) -> None:
    result = {
        **command_and_date(),
        "machine": cpu_and_cores(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
