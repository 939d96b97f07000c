"""The flags of `pagedray simulate`; those of requests have the names of `pagedray bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cluster.cli.flag_values import count, number
from cluster.cli.random_request_flags import add_random_requests, add_request_rate
from cluster.simulation.step_cost import MOST_TOKENS
from pagedray.config import Preemption, SchedulerConfig, StepLimits

if TYPE_CHECKING:
    import argparse

__all__ = ["COSTS", "add_simulate_flags"]

COSTS = ("llama-8b-h200",)
"""Names of built-in costs of steps."""
_CONFIG = SchedulerConfig()
_LIMITS = StepLimits()


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
        help="File of requests in JSON lines, instead of random ones: arrival_s, "
        "num_prompt_tokens and num_output_tokens, and optionally tenant, prefix and "
        "num_prefix_tokens.",
    )
    add_request_rate(group)
    add_random_requests(group)
    for flag, low, high, default, what in (
        ("--num-prefixes", 1, 10**6, 1, "Number of different prefixes, which are drawn at random."),
        (
            "--num-tenants",
            1,
            10**6,
            1,
            "Number of tenants, which are drawn at random and share no prefixes.",
        ),
        ("--seed", 0, 2**63 - 1, 0, "Random seed of lengths, intervals, prefixes and tenants."),
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
        help="Target for the time between tokens while prompts are processed. (default: no limit)",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="Disable prefix caching.")
    group.add_argument(
        "--no-cpu-prefix-cache",
        action="store_true",
        help="Do not keep prefixes that are evicted from the device in CPU blocks.",
    )
    for name, default, what in (
        ("read", 350.0, "read a block from a disk"),
        ("write", 700.0, "write a block to a disk"),
    ):
        group.add_argument(
            f"--disk-{name}-us",
            type=number(0.0, 1e9),
            default=default,
            metavar="US",
            help=f"Time to {what}, in microseconds.",
        )
    for flag, low, high, default, what in (
        ("--num-replicas", 1, 1000, 1, "Number of replicas behind the router of Ray Serve."),
        ("--num-blocks", 2, 10**8, 50_000, "Number of blocks in the KV cache of a replica."),
        (
            "--num-cpu-blocks",
            0,
            10**8,
            512,
            "Number of blocks in CPU memory, for swapping and prefixes.",
        ),
        ("--num-disk-blocks", 0, 10**8, 0, "Number of blocks on a disk, for prefixes."),
        ("--block-size", 1, 256, 16, "Tokens per block."),
        ("--max-num-seqs", 1, 10**5, _LIMITS.max_num_seqs, "Maximum number of sequences per step."),
        (
            "--max-num-batched-tokens",
            1,
            MOST_TOKENS,
            _LIMITS.max_num_batched_tokens,
            "Maximum number of tokens per step.",
        ),
        (
            "--max-model-len",
            2,
            MOST_TOKENS,
            131_072,
            "Maximum number of prompt and output tokens of a request.",
        ),
        (
            "--max-queued-requests",
            1,
            10**7,
            _CONFIG.max_queued_requests,
            "Maximum number of waiting requests per replica; others are rejected.",
        ),
        (
            "--max-queued-tokens",
            1,
            10**12,
            _CONFIG.max_queued_tokens,
            "Maximum number of waiting prompt tokens per replica; more are rejected.",
        ),
    ):
        _add_count(group, flag, low, high, default, what)


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="Write an SVG plot of sequences, cache use and throughput over time.",
    )
    group.add_argument(
        "--json", action="store_true", help="Print one JSON object instead of a table."
    )


def _add_count(
    group: argparse._ArgumentGroup, flag: str, low: int, high: int, default: int, what: str
) -> None:
    group.add_argument(flag, type=count(low, high), default=default, metavar="N", help=what)
