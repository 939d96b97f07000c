"""The flags of clients of a server: the API key, certificates and sampling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.cli.flag import Flag, add_flag, flag_adder
from pagedray.errors import StartupError
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    import argparse

__all__ = ["add_client_flags", "add_sampling_flags", "read_key", "sampling_fields", "with_key_hint"]

_MAX_KEY_BYTES = 4096

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


def add_client_flags(group: argparse._ActionsContainer, *, variables: str) -> None:
    """Add how a client proves who it is; `variables` are read without a file."""
    add = flag_adder(group)
    add(f"--api-key-file FILE: File with the API key. (default: the variable {variables})", Path)
    add(
        "--tls-ca FILE: CA certificates to trust, in PEM format. (default: the system's "
        "certificates)",
        Path,
    )


def with_key_hint(message: str, *, variables: str) -> str:
    """Return the message of a server that rejects a key, and the sources of a command's key."""
    return f"{message.rstrip('.')}. Use --api-key-file or set {variables}."


def read_key(path: Path | None) -> str | None:
    """Return the key in a file, or else PAGEDRAY_API_KEY. Raises StartupError."""
    if path is None:
        return os.environ.get("PAGEDRAY_API_KEY") or None
    try:
        with path.open(encoding="utf-8") as file:
            key = file.read(_MAX_KEY_BYTES).strip()
    except OSError as error:
        raise StartupError(f"Cannot read --api-key-file {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise StartupError(f"Cannot read --api-key-file {path}: it is not UTF-8.") from error
    if not key:
        raise StartupError(f"--api-key-file {path} is empty.")
    return key


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
