"""A fuzzing target: a parser, and the inputs that fuzzing starts from."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Target", "check_message", "load_target", "target_names"]

_FOLDER = Path(__file__).parent / "targets"
_MODULES = {path.stem: path.relative_to(_FOLDER) for path in _FOLDER.rglob("*.py")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One parser of bytes from outside."""

    run: Callable[[bytes], None]
    """Parses an input; every exception is a defect, since it catches those that are documented."""
    seeds: tuple[bytes, ...]
    """Valid inputs, from which others are made."""
    words: tuple[bytes, ...] = ()
    """Texts that occur in inputs of the format."""
    max_bytes: int = 2048
    """The longest input."""


def check_message(error: Exception) -> None:
    """Raise AssertionError unless an error's message is one line, for the log."""
    assert "\n" not in str(error), repr(str(error))


def target_names() -> list[str]:
    """Return the names of all targets, which are the modules in `targets/`."""
    return sorted(_MODULES)


def load_target(name: str) -> Target:
    """Return a target, with everything imported and cached that its inputs need."""
    module = ".".join(_MODULES[name].with_suffix("").parts)
    found = importlib.import_module(f"tests.hostile.fuzz.targets.{module}").TARGET
    assert isinstance(found, Target)
    for seed in found.seeds:
        found.run(seed)
    return found
