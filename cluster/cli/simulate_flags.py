"""The flags of `pagedray simulate`; flags of requests are named as in `pagedray bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

from cluster.cli.bench.flags import add_random_requests, add_request_rate
from cluster.cli.flag import NotedFlag, count, number
from cluster.simulation.step_cost import MOST_TOKENS
from pagedray.config import LARGE_LIMITS, Preemption, SchedulerConfig, StepLimits

if TYPE_CHECKING:
    import argparse

__all__ = ["COSTS", "add_simulate_flags", "set_sizes"]

COSTS = {"llama-8b-h200": (LARGE_LIMITS, 16_384)}
"""Built-in costs of steps, with the limits and the CPU blocks that `pagedray serve` would have.

The CPU blocks are a quarter of 128 GiB.
"""
_CONFIG = SchedulerConfig()
_FILE_SIZES = (StepLimits(), 512)
"""The limits and the CPU blocks with a cost from a file, which may be of any device."""


def add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `pagedray simulate` in groups."""
    _add_requests(parser.add_argument_group("requests"))
    replicas = parser.add_argument_group("replicas")
    _add_engine(replicas)
    _add_sizes(replicas)
    _add_limits(replicas)
    _add_output(parser.add_argument_group("output"))


def set_sizes(parsed: argparse.Namespace) -> None:
    """Set the limits of steps and the CPU blocks from the cost, unless given."""
    limits, num_cpu_blocks = COSTS.get(parsed.cost, _FILE_SIZES)
    for name, value in (
        ("max_num_seqs", limits.max_num_seqs),
        ("max_num_batched_tokens", limits.max_num_batched_tokens),
        ("num_cpu_blocks", num_cpu_blocks),
    ):
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="File of requests in JSON lines, in place of random requests: arrival_s, "
        "num_prompt_tokens and num_output_tokens, and optionally tenant, prefix and "
        "num_prefix_tokens.",
    )
    add_request_rate(group)
    add_random_requests(group)
    _add_count(
        group,
        "--num-prefixes",
        "Number of different prefixes, which are drawn at random.",
        high=10**6,
        default=1,
        action=NotedFlag,
    )
    _add_count(
        group,
        "--num-tenants",
        "Number of tenants, which are drawn at random and share no prefixes.",
        high=10**6,
        default=1,
        action=NotedFlag,
    )
    _add_count(
        group,
        "--seed",
        "Random seed of lengths, intervals, prefixes and tenants.",
        low=0,
        high=2**63 - 1,
        default=0,
        action=NotedFlag,
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    """Add how long steps and reads take, and how sequences and prefixes are handled."""
    group.add_argument(
        "--cost",
        default=next(iter(COSTS)),
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


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    """Add the number of replicas, and the sizes of their pools."""
    _add_count(
        group,
        "--num-replicas",
        "Number of replicas behind the router of Ray Serve.",
        high=1000,
        default=1,
    )
    _add_count(
        group,
        "--num-blocks",
        "Number of blocks in the KV cache of a replica.",
        low=2,
        high=10**8,
        default=50_000,
    )
    _add_count(
        group,
        "--num-cpu-blocks",
        "Number of blocks in CPU memory, for swapping and prefixes. (default: as `pagedray serve` "
        "on the GPU of --cost with 128 GiB of memory, 16384; with a file, 512)",
        low=0,
        high=10**8,
        default=None,
    )
    _add_count(
        group,
        "--num-disk-blocks",
        "Number of blocks on a disk, for prefixes.",
        low=0,
        high=10**8,
        default=0,
    )
    _add_count(group, "--block-size", "Tokens per block.", high=256, default=16)


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the limits on steps, requests and the queue."""
    _add_count(
        group,
        "--max-num-seqs",
        "Maximum number of sequences per step. (default: as `pagedray serve` on the GPU of "
        "--cost, 1024; with a file, 256)",
        high=10**5,
        default=None,
    )
    _add_count(
        group,
        "--max-num-batched-tokens",
        "Maximum number of tokens per step. (default: as `pagedray serve` on the GPU of --cost, "
        "8192; with a file, 2048)",
        high=MOST_TOKENS,
        default=None,
    )
    _add_count(
        group,
        "--max-model-len",
        "Maximum number of prompt and output tokens of a request.",
        low=2,
        high=MOST_TOKENS,
        default=131_072,
    )
    _add_count(
        group,
        "--max-queued-requests",
        "Maximum number of waiting requests per replica; others are rejected.",
        high=10**7,
        default=_CONFIG.max_queued_requests,
    )
    _add_count(
        group,
        "--max-queued-tokens",
        "Maximum number of waiting prompt tokens per replica; more are rejected.",
        high=10**12,
        default=_CONFIG.max_queued_tokens,
    )


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
    group: argparse._ArgumentGroup,
    flag: str,
    what: str,
    *,
    low: int = 1,
    high: int,
    default: int | None,
    action: type[argparse.Action] | str = "store",
) -> None:
    """Add a flag for an integer in a range."""
    kind = count(low, high)
    group.add_argument(flag, action=action, type=kind, default=default, metavar="N", help=what)
