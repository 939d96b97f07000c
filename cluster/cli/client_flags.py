"""The flags of commands that are clients of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_client_flags"]


def add_client_flags(group: argparse._ActionsContainer, *, variables: str) -> None:
    """Add how a client proves who it is; `variables` are read without a file."""
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"File with the API key. (default: the variable {variables})",
    )
    group.add_argument(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="CA certificates to trust, in PEM format. (default: the system's)",
    )
