"""The CPU image: built by buildah from the unchanged Dockerfile, and its files mounted."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.image.base_image import DOCKERFILE, FOLDER, ROOT, buildah

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BuiltImage", "Mount", "PipSettings", "build_image"]

_PYPI = "https://pypi.org/simple"

_FILES = "/run/pip"
"""Where files are in the build. Their own paths may belong to packages that it installs."""
_ENVIRONMENT = ":env:"


def build_image(name: str) -> None:
    """Build the target `cpu` under a name. Only package indexes are reached."""
    settings = PipSettings.read()
    configuration = FOLDER / "pip.conf"
    configuration.write_text(settings.text)
    volumes = [f"--volume={configuration}:/etc/pip.conf:ro"]
    volumes += [f"--volume={one.source}:{one.target}:ro" for one in settings.mounts]
    # Otherwise torch comes from the index that the Dockerfile names.
    has_local_torch = has_cpu_torch(ROOT / "constraints.txt")
    index = [f"--build-arg=TORCH_INDEX={_PYPI}"] if has_local_torch else []
    buildah(
        "build",
        *("--file", str(DOCKERFILE), "--target", "cpu", "--tag", name),
        *("--pull-never", "--layers=false", "--jobs=2", "--format=docker"),
        *("--isolation=oci", "--runtime=runc", "--network=host"),
        *volumes,
        *index,
        str(ROOT),
    )


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """The files of an image and what it declares for containers."""

    root: Path
    env: dict[str, str]
    command: tuple[str, ...]
    working_dir: str
    user: str

    @classmethod
    def mount(cls, name: str) -> BuiltImage:
        """Mount an image of the storage until the mount namespace ends."""
        container = buildah("from", "--pull-never", name).strip()
        root = Path(buildah("mount", container).strip())
        # Any: JSON.
        config: dict[str, Any] = json.loads(buildah("inspect", container))["OCIv1"]["config"]
        return cls(
            root=root,
            env=dict(one.split("=", 1) for one in config["Env"]),
            command=(*config["Entrypoint"], *config.get("Cmd", [])),
            working_dir=config["WorkingDir"],
            user=config["User"],
        )

    def packages(self) -> set[str]:
        """The names in the folder of Python packages."""
        [folder] = self.root.glob("opt/venv/lib/python3*/site-packages")
        return {path.name for path in folder.iterdir()}

    def num_bytes(self) -> int:
        """The size of its files on disk."""
        total = 0
        for folder, _, names in os.walk(self.root):
            total += sum(Path(folder, name).lstat().st_blocks * 512 for name in names)
        return total


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
