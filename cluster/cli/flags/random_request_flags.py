"""The flags of random requests and their rate, as load tests and simulations take them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.cli.flags.flag_values import count, number
from cluster.cli.flags.noted_flag import NotedFlag

if TYPE_CHECKING:
    import argparse

__all__ = ["MOST_REQUESTS", "add_random_requests", "add_request_rate"]

MOST_REQUESTS = 10_000_000
_MOST_TOKENS = 10_000_000


def add_random_requests(group: argparse._ArgumentGroup) -> None:
    """Add the number of requests and their lengths."""
    for flag, least, most, default, what in (
        ("--num-prompts", 1, MOST_REQUESTS, 1000, "Number of requests."),
        ("--random-input-len", 1, _MOST_TOKENS, 1024, "Number of tokens per random prompt."),
        (
            "--random-output-len",
            1,
            _MOST_TOKENS,
            128,
            "Number of tokens to generate per random prompt.",
        ),
        (
            "--random-prefix-len",
            0,
            _MOST_TOKENS,
            0,
            "Number of additional tokens that random prompts share at their beginning.",
        ),
    ):
        group.add_argument(
            flag,
            action=NotedFlag,
            type=count(least, most),
            default=default,
            metavar="N",
            help=what,
        )
    group.add_argument(
        "--random-range-ratio",
        action=NotedFlag,
        type=number(0.0, 1.0),
        default=0.0,
        metavar="R",
        help="Draw lengths uniformly from 1 - R to 1 + R times the given length.",
    )


def add_request_rate(group: argparse._ArgumentGroup) -> None:
    """Add how often a request is sent."""
    group.add_argument(
        "--request-rate",
        action=NotedFlag,
        type=number(1e-6, math.inf),
        default=math.inf,
        metavar="R",
        help="Requests per second, at random intervals; inf sends all at once.",
    )
