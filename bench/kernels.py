"""Bandwidth of the Triton paged decode kernel on a GPU.

    python -m bench.kernels --output bench/results/kernels.json

Each case is a CUDA graph of several launches; times are medians over replays, between CUDA events.
A launch reads many times the size of the L2 cache, with blocks in random order. Only bytes of keys
and values are counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from attention.kernels.triton.options import AttentionOptions
from attention.kernels.triton.paged_decode import num_scratch_elements, paged_decode
from attention.kernels.triton.tuning import (
    PagedAttentionTuning,
    default_decode_tuning,
    default_num_splits,
)

LAUNCHES = 10
REPLAYS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A batch of decodes of equal length."""

    batch_size: int = 64
    seq_len: int = 2048
    block_size: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of keys and values that one launch reads, bfloat16."""
        return 4 * self.batch_size * self.seq_len * self.num_kv_heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    workload: Workload
    tuning: PagedAttentionTuning
    is_default: bool
    microseconds: float
    terabytes_per_second: float


def defaults(workload: Workload) -> PagedAttentionTuning:
    """Return the tuning that backends use."""
    properties = torch.cuda.get_device_properties("cuda")
    num_splits = default_num_splits(
        num_sequences=workload.batch_size,
        num_kv_heads=workload.num_kv_heads,
        max_seq_len=workload.seq_len,
        num_multiprocessors=properties.multi_processor_count,
    )
    return default_decode_tuning(
        num_queries_per_kv=workload.num_heads // workload.num_kv_heads,
        head_size=workload.head_size,
        dtype=torch.bfloat16,
        num_splits=num_splits,
    )


def sweep(default: PagedAttentionTuning) -> list[PagedAttentionTuning]:
    """Return the default tuning and variations of it."""
    tunings = [default]
    for tile_keys, num_warps, num_stages, num_splits in itertools.product(
        (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4, 8)
    ):
        if 16 <= tile_keys // num_warps <= 32 and tile_keys * num_stages <= 384:
            other = replace(
                default,
                tile_keys=tile_keys,
                num_warps=num_warps,
                num_stages=num_stages,
                num_splits=num_splits,
            )
            tunings.append(other)
    return list(dict.fromkeys(tunings))


class Decodes:
    """The tensors of one workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        num_blocks = -(-workload.seq_len // workload.block_size)
        count = workload.batch_size * num_blocks
        rows = workload.block_size, workload.num_kv_heads, workload.head_size
        heads = workload.batch_size, workload.num_heads, workload.head_size
        self._cache = torch.randn(count, 2, *rows, dtype=torch.bfloat16, device="cuda")
        self._query = torch.randn(*heads, dtype=torch.bfloat16, device="cuda")
        self._out = torch.empty_like(self._query)
        order = torch.randperm(count, device="cuda").to(torch.int32)
        self._tables = order.view(workload.batch_size, num_blocks)
        self._seq_lens = torch.full(
            (workload.batch_size,), workload.seq_len, dtype=torch.int32, device="cuda"
        )

    def set_lengths(self, seq_lens: torch.Tensor) -> None:
        """Attend to so many keys of each sequence, int32 `[batch_size]`, at most `seq_len`."""
        self._seq_lens.copy_(seq_lens)

    def microseconds(self, tuning: PagedAttentionTuning) -> float:
        """Return the median time of one launch."""
        workload = self._workload
        num_elements = num_scratch_elements(
            num_sequences=workload.batch_size,
            num_heads=workload.num_heads,
            head_size=workload.head_size,
            num_splits=tuning.num_splits,
        )
        scratch = torch.empty(num_elements, device="cuda")

        def launch() -> None:
            paged_decode(
                self._query,
                self._cache,
                seq_lens=self._seq_lens,
                block_tables=self._tables,
                options=AttentionOptions(scale=workload.head_size**-0.5, window_right=0),
                tuning=tuning,
                scratch=scratch,
                out=self._out,
            )

        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                launch()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1000 * start.elapsed_time(end) / LAUNCHES)
        return statistics.median(times)


def measure(workload: Workload) -> list[Row]:
    """Return a row for each tuning that fits the GPU, the fastest first."""
    decodes = Decodes(workload)
    default = defaults(workload)
    rows = []
    for tuning in sweep(default):
        try:
            time_us = decodes.microseconds(tuning)
        except triton.runtime.errors.OutOfResources:
            continue
        row = Row(
            workload=workload,
            tuning=tuning,
            is_default=tuning == default,
            microseconds=time_us,
            terabytes_per_second=workload.cache_bytes / time_us / 1e6,
        )
        rows.append(row)
    return sorted(rows, key=lambda row: row.microseconds)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--print", type=int, default=12, help="fastest tunings to print")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    for block_size in arguments.block_sizes:
        workload = Workload(
            block_size=block_size, batch_size=arguments.batch_size, seq_len=arguments.seq_len
        )
        measured = measure(workload)
        rows.extend(measured)
        for place, row in enumerate(measured):
            if place < arguments.print or row.is_default:
                tuning = row.tuning
                print(
                    f"block {block_size:3}  keys {tuning.tile_keys:3}  warps {tuning.num_warps}  "
                    f"stages {tuning.num_stages}  splits {tuning.num_splits}  "
                    f"{row.microseconds:7.1f} us  {row.terabytes_per_second:.2f} TB/s"
                    f"{'  default' if row.is_default else ''}",
                    flush=True,
                )
    if arguments.output:
        result = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": [asdict(row) for row in rows],
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
