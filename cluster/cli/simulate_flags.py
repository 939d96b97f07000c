"""The flags of `pagedray simulate`; flags of requests are named as in `pagedray bench serve`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from cluster.cli.bench.flags import add_random_requests, add_request_rate
from cluster.cli.flag import NotedFlag, count, flag_adder, number
from cluster.simulation.step_cost import MOST_TOKENS
from pagedray.config import LARGE_LIMITS, Preemption, SchedulerConfig, StepLimits

__all__ = ["COSTS", "add_simulate_flags", "set_sizes"]

COSTS = {"llama-8b-h200": (LARGE_LIMITS, 16_384)}
"""Built-in costs of steps, with the limits and the CPU blocks that `pagedray serve` would have.

The CPU blocks are a quarter of 128 GiB.
"""
_CONFIG = SchedulerConfig()
_FILE_SIZES = (StepLimits(), 512)
"""The limits and the CPU blocks with a cost from a file, which may be of any device."""
_MOST_LAYERS = 256


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
    add = flag_adder(group)
    add(
        "--trace FILE: File of requests in JSON lines, in place of random requests: arrival_s, "
        "num_prompt_tokens and num_output_tokens, and optionally tenant, prefix and "
        "num_prefix_tokens.",
        Path,
    )
    add_request_rate(group)
    add_random_requests(group)
    add(
        "--num-prefixes N: Number of different prefixes, which are drawn at random.",
        count(1, 10**6),
        1,
        action=NotedFlag,
    )
    add(
        "--num-tenants N: Number of tenants, which are drawn at random and share no prefixes.",
        count(1, 10**6),
        1,
        action=NotedFlag,
    )
    add(
        "--seed N: Random seed of lengths, intervals, prefixes and tenants.",
        count(0, 2**63 - 1),
        0,
        action=NotedFlag,
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    """Add how long steps and reads take, and how sequences and prefixes are handled."""
    add = flag_adder(group)
    add(
        f"--cost NAME_OR_FILE: How long steps take: {', '.join(COSTS)}, or a JSON file "
        "(docs/simulation.md).",
        default=next(iter(COSTS)),
    )
    add(
        "--preemption: How a sequence is preempted when blocks run out.",
        get_args(Preemption),
        _CONFIG.preemption,
    )
    add(
        "--itl-target-ms MS: Target for the time between tokens while prompts are processed. "
        "(default: no limit)",
        number(1e-3, 1e9),
    )
    add(
        "--num-speculative-tokens N: Maximum number of guessed tokens of a sequence in a step; "
        "0 turns speculation off.",
        count(0, 1000),
        0,
    )
    add(
        "--draft-acceptance P: Probability that a guessed token is right if those before it are, "
        "0 to 1. (default: 0.7)",
        number(0.0, 1.0),
    )
    add("--no-prefix-cache: Disable prefix caching.")
    add(
        "--no-cpu-prefix-cache: Do not keep prefixes that are evicted from the device in CPU "
        "blocks."
    )
    for name, default, what in (
        ("read", 350.0, "read a block from a disk"),
        ("write", 700.0, "write a block to a disk"),
    ):
        add(f"--disk-{name}-us US: Time to {what}, in microseconds.", number(0.0, 1e9), default)


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    """Add the number of replicas, and the sizes of their pools."""
    add = flag_adder(group)
    add("--num-replicas N: Number of replicas behind the router of Ray Serve.", count(1, 1000), 1)
    add("--num-blocks N: Number of blocks in the KV cache of a replica.", count(2, 10**8), 50000)
    add(
        "--num-cpu-blocks N: Number of blocks in CPU memory, for swapping and prefixes. (default: "
        "as `pagedray serve` on the GPU of --cost with 128 GiB of memory, 16384; with a file, 512)",
        count(0, 10**8),
    )
    add("--num-disk-blocks N: Number of blocks on a disk, for prefixes.", count(0, 10**8), 0)
    add("--block-size N: Tokens per block.", count(1, 256), 16)
    add(
        "--layer-windows LIST: Sliding windows of the layers, in tokens, separated by commas: 0 "
        "for no window, and 30x1024 for 30 layers with a window of 1024. Numbers of blocks and "
        "times per block are those of blocks of all layers. (default: no windows)",
        _layer_windows,
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """Add the limits on steps, requests and the queue."""
    add = flag_adder(group)
    add(
        "--max-num-seqs N: Maximum number of sequences per step. (default: as `pagedray serve` on "
        "the GPU of --cost, 1024; with a file, 256)",
        count(1, 10**5),
    )
    add(
        "--max-num-batched-tokens N: Maximum number of tokens per step. (default: as `pagedray "
        "serve` on the GPU of --cost, 8192; with a file, 2048)",
        count(1, MOST_TOKENS),
    )
    add(
        "--max-model-len N: Maximum number of prompt and output tokens of a request.",
        count(2, MOST_TOKENS),
        131_072,
    )
    add(
        "--max-queued-requests N: Maximum number of waiting requests per replica; others are "
        "rejected.",
        count(1, 10**7),
        _CONFIG.max_queued_requests,
    )
    add(
        "--max-queued-tokens N: Maximum number of waiting prompt tokens per replica; more are "
        "rejected.",
        count(1, 10**12),
        _CONFIG.max_queued_tokens,
    )


def _layer_windows(text: str) -> tuple[int | None, ...]:
    """Return the window of each layer in a list such as `2x0,30x1024`."""
    windows: list[int | None] = []
    for item in text.split(","):
        times, _, window = item.rpartition("x")
        num_layers = count(1, _MOST_LAYERS)(times or "1")
        windows += [count(0, MOST_TOKENS)(window) or None] * num_layers
    if len(windows) > _MOST_LAYERS:
        raise argparse.ArgumentTypeError(f"must have at most {_MOST_LAYERS} layers, not {text!r}")
    return tuple(windows)


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = flag_adder(group)
    add("--plot FILE: Write an SVG plot of sequences, cache use and throughput over time.", Path)
    add("--json: Print one JSON object instead of a table.")
