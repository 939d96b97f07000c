"""The flags of commands that are clients of a server, and the key that they name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pagedray.errors import StartupError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_client_flags", "read_key", "with_key_hint"]

_MAX_KEY_BYTES = 4096


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
        help="CA certificates to trust, in PEM format. (default: those of the system)",
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
