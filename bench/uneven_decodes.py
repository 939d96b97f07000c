"""Attention of decodes of many lengths on a GPU, as they came and longest first.

    python -m bench.uneven_decodes --output bench/results/uneven_decodes.json

The lengths are those of the sequences that run at a step of `mixed` of `bench.engine`, each launch
is timed as in `bench.kernels`, and only bytes of keys and values are counted. `even` has as many
keys in sequences of one length. Further splits are programs that share the keys of a sequence, each
at least `min_split_keys`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.engine import WORKLOADS, write_results
from bench.kernels import Decodes, Workload, defaults

_BLOCK_SIZE = 16
_KEY_HEAD_BYTES = 512
"""Of a key and a value of 128 elements in bfloat16."""
_SPLITS = ((2, 256), (4, 256), (4, 512), (8, 512))
"""Numbers of splits and the fewest keys of each, beside the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    num_sequences: int
    num_kv_heads: int
    order: str
    num_splits: int
    min_split_keys: int
    is_default: bool
    microseconds: float
    terabytes_per_second: float


def main() -> int:
    """Measure, print, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-sequences", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--num-kv-heads", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    for num_kv_heads in options.num_kv_heads:
        for num_sequences in options.num_sequences:
            rows += measure(running_lengths(num_sequences), num_kv_heads)
            if options.output is not None:
                write_results(options.output, "decodes of mixed lengths", rows=rows)
    return 0


def running_lengths(num_sequences: int) -> list[int]:
    """Return the lengths of as many sequences, or more, at the last step that has them."""
    [workload] = [one for one in WORKLOADS["llama-8b"] if one.name == "mixed"]
    lengths = workload.lengths()
    # The step of which so many sequences see the next one.
    step = sorted((new for _, new in lengths), reverse=True)[num_sequences - 1] - 1
    return [prompt + step for prompt, new in lengths if new > step]


def measure(lengths: list[int], num_kv_heads: int) -> list[Row]:
    """Return a row for each order and number of splits."""
    workload = Workload(
        batch_size=len(lengths),
        seq_len=max(lengths),
        block_size=_BLOCK_SIZE,
        num_heads=4 * num_kv_heads,
        num_kv_heads=num_kv_heads,
    )
    num_bytes = sum(lengths) * num_kv_heads * _KEY_HEAD_BYTES
    default = defaults(workload)
    tunings = [default]
    tunings += [replace(default, num_splits=one, min_split_keys=keys) for one, keys in _SPLITS]
    orders = {
        "as they came": lengths,
        "longest first": sorted(lengths, reverse=True),
        "even": [sum(lengths) // len(lengths)] * len(lengths),
    }
    decodes = Decodes(workload)
    rows: list[Row] = []
    for order, ordered in orders.items():
        for tuning in tunings:
            decodes.set_lengths(torch.tensor(ordered, dtype=torch.int32))
            microseconds = decodes.microseconds(tuning)
            rows.append(
                Row(
                    num_sequences=len(lengths),
                    num_kv_heads=num_kv_heads,
                    order=order,
                    num_splits=tuning.num_splits,
                    min_split_keys=tuning.min_split_keys,
                    is_default=tuning == default,
                    microseconds=round(microseconds, 1),
                    terabytes_per_second=round(num_bytes / microseconds / 1e6, 2),
                )
            )
            row = rows[-1]
            print(
                f"{row.num_sequences:4} x {num_kv_heads} heads  {order:13}  splits "
                f"{row.num_splits:2} of {row.min_split_keys:3}  {row.microseconds:7.1f} us  "
                f"{row.terabytes_per_second:.2f} TB/s{' (default)' if row.is_default else ''}",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    sys.exit(main())
