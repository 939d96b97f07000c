"""The settings of this machine's pip, for a build: they reach its commands and not the image.

A machine may reach the package index through a proxy with a certificate of its own, or have wheels
in a folder. The settings name such files, so those are mounted as well.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Mount", "PipSettings", "has_cpu_torch"]

_FILES = "/run/pip"
"""Where files are in the build. Their own paths may belong to packages that it installs."""
_ENVIRONMENT = ":env:"


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine, and where it is read-only in the build."""

    source: Path
    target: str


@dataclass(frozen=True, slots=True)
class PipSettings:
    """pip's configuration file for the build, and what else it needs."""

    text: str
    mounts: tuple[Mount, ...]

    @classmethod
    def read(cls) -> PipSettings:
        """Return the settings of this machine."""
        listed = _pip("config", "list")
        return cls.of([line for line in listed.splitlines() if "=" in line])

    @classmethod
    def of(cls, lines: list[str]) -> PipSettings:
        """Return the settings that `pip config list` prints."""
        values: dict[str, str] = {}
        for line in sorted(lines, key=lambda one: one.startswith(_ENVIRONMENT)):
            # Variables of the environment win; they have no section.
            name, _, value = line.removeprefix(_ENVIRONMENT).partition("=")
            _, _, option = name.partition(".")
            values[option] = ast.literal_eval(value)
        mounts: dict[str, Mount] = {}
        options = []
        for option, value in values.items():
            words = list(_mounted(value.split(), mounts))
            options.append(f"{option} = " + "\n    ".join(words))
        return cls("\n".join(["[global]", *options, ""]), tuple(mounts.values()))


def has_cpu_torch(constraints: Path) -> bool:
    """Return whether this machine's own settings find a torch without CUDA."""
    report = _pip(
        *("install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-"),
        *("-c", str(constraints), "torch"),
    )
    [found] = json.loads(report)["install"]
    version: str = found["metadata"]["version"]
    return version.endswith("+cpu")


def _mounted(words: list[str], mounts: dict[str, Mount]) -> Iterator[str]:
    """Return the words of a value as they are in the build, and add what they name."""
    for word in words:
        path = Path(word.removeprefix("file://"))
        if not path.is_absolute() or not path.exists():
            yield word
        elif path.is_file():
            target = f"{_FILES}/{path.name}"
            mounts[str(path)] = Mount(path, target)
            yield target
        else:
            # The pages of an index refer to files beside it.
            folder = path.parent if word.startswith("file://") else path
            mounts[str(folder)] = Mount(folder, str(folder))
            yield word


def _pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
