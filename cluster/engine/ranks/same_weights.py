"""Checks that all ranks of a group have loaded the same weights, also those that start later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["check_same_weights"]


def check_same_weights(digests: Sequence[Mapping[str, str]], folder: Path) -> None:
    """Raise StartupError for a file of which two ranks have loaded different versions.

    `digests` has one of each file, for each rank.
    """
    first = digests[0]
    for rank, other in enumerate(digests):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise StartupError(
                    f"{folder / name} differs between rank 0 and rank {rank}: the file has "
                    "changed since one of them loaded it, or their nodes have different copies. "
                    "All ranks need the same weights."
                )
