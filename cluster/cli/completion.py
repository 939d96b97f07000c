"""Scripts that complete commands, flags, values and paths in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import shtab

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["completion_script"]

_FOLDERS = frozenset(("FOLDER", "MODEL"))


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of a shell: bash, tcsh or zsh."""
    for action in _actions(parser):
        # A shell completes nothing by itself once it has a script for a command.
        if action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # what shtab reads
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
    return str(shtab.complete(parser, shell))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
