"""The flags of `pagedray simulate`; those of requests have the names of `pagedray bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cluster.cli.flag_values import count, number
from cluster.cli.random_request_flags import add_random_requests, add_request_rate
from cluster.simulation.step_cost import MOST_TOKENS
from pagedray.config import DEFAULT_MAX_NUM_SEQS, Preemption, SchedulerConfig

if TYPE_CHECKING:
    import argparse

__all__ = ["COSTS", "add_simulate_flags"]

COSTS = ("llama-8b-h200",)
"""Names of built-in costs of steps."""
_CONFIG = SchedulerConfig()


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """Add them in groups."""
    _add_requests(parser.add_argument_group("requests"))
    _add_replicas(parser.add_argument_group("replicas"))
    _add_output(parser.add_argument_group("output"))


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Requests in JSON lines, in place of random ones: arrival_s, num_prompt_tokens and "
        "num_output_tokens, and optionally tenant, prefix and num_prefix_tokens.",
    )
    add_request_rate(group)
    add_random_requests(group)
    for flag, low, high, default, what in (
        ("--num-prefixes", 1, 10**6, 1, "Different ones of these, drawn at random."),
        ("--num-tenants", 1, 10**6, 1, "Tenants, which share no prefixes, drawn at random."),
        ("--seed", 0, 2**63 - 1, 0, "Of lengths, intervals, prefixes and tenants."),
    ):
        _add_count(group, flag, low, high, default, what)


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cost",
        default=COSTS[0],
        metavar="NAME_OR_FILE",
        help=f"How long steps take: {', '.join(COSTS)}, or a JSON file (docs/simulation.md).",
    )
    group.add_argument(
        "--preemption",
        choices=get_args(Preemption),
        default=_CONFIG.preemption,
        help="How a sequence is preempted when blocks run out.",
    )
    group.add_argument(
        "--itl-target-ms",
        type=number(1e-3, 1e9),
        metavar="MS",
        help="Time between tokens that prompts should not make longer. (default: no limit)",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="Compute equal prefixes again."
    )
    group.add_argument(
        "--no-cpu-prefix-cache",
        action="store_true",
        help="Do not keep prefixes in the CPU blocks when they have no room on the device.",
    )
    for name, default, what in (("read", 350.0, "read"), ("write", 700.0, "written")):
        group.add_argument(
            f"--disk-{name}-us",
            type=number(0.0, 1e9),
            default=default,
            metavar="US",
            help=f"Microseconds in which a block is {what} on a disk.",
        )
    for flag, low, high, default, what in (
        ("--num-replicas", 1, 1000, 1, "Replicas behind the router of Ray Serve."),
        ("--num-blocks", 2, 10**8, 50_000, "Blocks of the KV cache of a replica."),
        ("--num-cpu-blocks", 0, 10**8, 512, "Blocks in CPU memory, for swapping and prefixes."),
        ("--num-disk-blocks", 0, 10**8, 0, "Blocks on a disk, for prefixes."),
        ("--block-size", 1, 256, 16, "Tokens per block."),
        ("--max-num-seqs", 1, 10**5, DEFAULT_MAX_NUM_SEQS, "Most sequences in a step."),
        (
            "--max-num-batched-tokens",
            1,
            MOST_TOKENS,
            _CONFIG.max_num_batched_tokens,
            "Most tokens in a step.",
        ),
        ("--max-model-len", 2, MOST_TOKENS, 131_072, "Most tokens of prompt and output."),
        (
            "--max-queued-requests",
            1,
            10**7,
            _CONFIG.max_queued_requests,
            "Most waiting requests of a replica; it refuses others.",
        ),
        (
            "--max-queued-tokens",
            1,
            10**12,
            _CONFIG.max_queued_tokens,
            "Most waiting prompt tokens of a replica.",
        ),
    ):
        _add_count(group, flag, low, high, default, what)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Write an SVG file of sequences, cache and throughput over time.",
    )
    group.add_argument("--json", action="store_true", help="Print one JSON object, not a table.")


def _add_count(
    group: argparse._ArgumentGroup, flag: str, low: int, high: int, default: int, what: str
) -> None:
    group.add_argument(flag, type=count(low, high), default=default, metavar="N", help=what)
