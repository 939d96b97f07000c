"""The flags of `pagedray bench latency` and `throughput`, with vLLM's names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cluster.cli.bench.workloads import WORKLOADS
from cluster.cli.flags.flag_values import count, number

if TYPE_CHECKING:
    import argparse

__all__ = ["DEFAULT_NUM_PROMPTS", "LENGTH_FLAGS", "add_latency_flags", "add_throughput_flags"]

DEFAULT_NUM_PROMPTS = 1000
LENGTH_FLAGS = {
    "input_len": (1024, "Number of tokens per prompt."),
    "output_len": (128, "Number of tokens to generate per prompt."),
    "prefix_len": (0, "Number of additional tokens that all prompts share at their beginning."),
}
"""Defaults and texts of the lengths of `throughput`, by their names."""
_MOST_TOKENS = 10_000_000
_MOST_REQUESTS = 1_000_000


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a batch that is generated again and again."""
    group = parser.add_argument_group("benchmark")
    for flag, default, what in (
        ("--input-len", 32, "Number of tokens per prompt."),
        ("--output-len", 128, "Number of tokens to generate per prompt."),
        ("--batch-size", 8, "Number of prompts per batch."),
        ("--num-iters", 30, "Number of measured batches."),
    ):
        group.add_argument(
            flag, type=count(1, _MOST_TOKENS), default=default, metavar="N", help=what
        )
    group.add_argument(
        "--num-iters-warmup",
        type=count(0, _MOST_TOKENS),
        default=10,
        metavar="N",
        help="Number of warm-up batches before the measured ones.",
    )
    _add_output(group)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of requests that are submitted at once."""
    group = parser.add_argument_group("benchmark")
    group.add_argument(
        "--workload",
        choices=tuple(WORKLOADS),
        help="Named set of requests, which replaces the flags for their number and lengths. "
        "(default: random prompts)",
    )
    group.add_argument(
        "--num-prompts",
        type=count(1, _MOST_REQUESTS),
        metavar="N",
        help=f"Number of requests. (default: {DEFAULT_NUM_PROMPTS})",
    )
    for name, (default, what) in LENGTH_FLAGS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            f"--random-{name.replace('_', '-')}",
            type=count(min(default, 1), _MOST_TOKENS),
            metavar="N",
            help=f"{what} (default: {default})",
        )
    group.add_argument(
        "--random-range-ratio",
        type=number(0.0, 1.0),
        metavar="R",
        help="Draw lengths uniformly from 1 - R to 1 + R times the given length. (default: 0)",
    )
    _add_output(group)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Random seed of prompts and lengths."
    )
    group.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a table."
    )
    group.add_argument(
        "--output-json", type=Path, metavar="FILE", help="Also write the JSON object to a file."
    )
    group.add_argument("--disable-tqdm", action="store_true", help="Show no progress bar.")
