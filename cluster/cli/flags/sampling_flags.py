"""The flags of sampling, of the commands that generate text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.cli.flags.flag import Flag, add_flag
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse

__all__ = ["add_sampling_flags", "sampling_fields"]

_SAMPLING = (
    Flag("max_tokens", "Maximum number of tokens to generate.", int),
    Flag(
        "temperature",
        "Sampling temperature; 0 is greedy. (default: from --generation-config, or 0)",
        float,
        "T",
    ),
    Flag(
        "top_p",
        "Sample from the most likely tokens with this cumulative probability. (default: "
        "from --generation-config, or 1)",
        float,
        "P",
    ),
    Flag(
        "top_k",
        "Sample from the K most likely tokens; 0 or -1 samples from all. (default: from "
        "--generation-config, or 0)",
        int,
        "K",
    ),
    Flag("seed", "Random seed of sampling. (default: random)", int),
)


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the flags that `sampling_fields` reads to a command."""
    group = parser.add_argument_group("sampling")
    for flag in _SAMPLING:
        add_flag(group, flag, max_tokens if flag.field == "max_tokens" else None)


def sampling_fields(parsed: argparse.Namespace) -> dict[str, Any]:  # Any: fields of all types
    """Return the sampling parameters that the command line sets.

    Raises InvalidRequestError for a value that is not allowed.
    """
    given = {flag.field: getattr(parsed, flag.field) for flag in _SAMPLING}
    fields = {name: value for name, value in given.items() if value is not None}
    SamplingParams(**fields)
    return fields
