"""Attention of decodes of many lengths, and of decodes that share prefixes, on a GPU.

    python -m bench.uneven_decodes --output bench/results/uneven_decodes.json

The lengths of `mixed` are those of the sequences that run at a step of that workload of
`bench.engine`; `even` has as many keys in sequences of one length. In `prefixes`, 16 prefixes of
2048 keys are each shared by a sixteenth of the sequences, which have 64 keys of their own. Each
launch is timed as in `bench.kernels`, and every key and value of a sequence is counted, read or
not. `slots` is the number of programs of a KV head for which the keys are divided.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.engine import WORKLOADS, write_results
from bench.kernels import Decodes, Settings, Workload, defaults

_BLOCK_SIZE = 16
_KEY_HEAD_BYTES = 512
"""Of a key and a value of 128 elements in bfloat16."""
_NUM_PREFIXES = 16
_PREFIX_KEYS = 2048
_OWN_KEYS = 64
_SHARES_OF_SLOTS = (1, 2, 4)
"""Slots beside the default are a half and a quarter of it; fewer slots make longer ranges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    case: str
    num_sequences: int
    num_kv_heads: int
    num_slots: int
    shares: bool
    """Whether programs attend for several sequences that share keys."""
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
            lengths = running_lengths(num_sequences)
            even = [sum(lengths) // len(lengths)] * len(lengths)
            rows += measure("mixed", lengths, num_kv_heads)
            rows += measure("even", even, num_kv_heads)
            shared = [_PREFIX_KEYS + _OWN_KEYS] * num_sequences
            rows += measure("prefixes", shared, num_kv_heads, num_prefixes=_NUM_PREFIXES)
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


def measure(
    case: str, lengths: list[int], num_kv_heads: int, *, num_prefixes: int = 0
) -> list[Row]:
    """Return a row for each number of slots, and with prefixes one that does not share them."""
    workload = Workload(
        batch_size=len(lengths),
        seq_len=max(lengths),
        block_size=_BLOCK_SIZE,
        num_heads=4 * num_kv_heads,
        num_kv_heads=num_kv_heads,
    )
    num_bytes = sum(lengths) * num_kv_heads * _KEY_HEAD_BYTES
    default = defaults(workload)
    tuning, division = default
    settings: list[Settings] = [
        (tuning, replace(division, costs=replace(division.costs, num_slots=num_slots)))
        for num_slots in (division.costs.num_slots // share for share in _SHARES_OF_SLOTS)
    ]
    decodes = Decodes(workload)
    decodes.set_lengths(lengths)
    if num_prefixes:
        decodes.share(max(1, len(lengths) // num_prefixes), _PREFIX_KEYS)
        settings.append((tuning, replace(division, rows_per_item=1)))
    rows: list[Row] = []
    for one in settings:
        microseconds = decodes.microseconds(one)
        rows.append(
            Row(
                case=case,
                num_sequences=len(lengths),
                num_kv_heads=num_kv_heads,
                num_slots=one[1].costs.num_slots,
                shares=one[1].rows_per_item > 1,
                is_default=one == default,
                microseconds=round(microseconds, 1),
                terabytes_per_second=round(num_bytes / microseconds / 1e6, 2),
            )
        )
        row = rows[-1]
        print(
            f"{case:8}  {row.num_sequences:4} x {num_kv_heads} heads  slots {row.num_slots:3}  "
            f"{'shared' if row.shares else 'alone '}  {row.microseconds:7.1f} us  "
            f"{row.terabytes_per_second:.2f} TB/s{' (default)' if row.is_default else ''}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
