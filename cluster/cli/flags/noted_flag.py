"""Flags that know whether they were given, so that a command can reject flags without effect."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NotedFlag", "noted_flags"]

_DEST = "noted_flags"


class NotedFlag(argparse.Action):
    """Stores the value of a flag, and notes that the flag was given."""

    # Any: argparse's own arguments.
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _DEST, (*noted_flags(namespace), option))


def noted_flags(parsed: argparse.Namespace) -> Sequence[str]:
    """Return the flags with the action `NotedFlag` that were given, in their order."""
    flags: Sequence[str] = getattr(parsed, _DEST, ())
    return flags
