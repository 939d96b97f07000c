"""The CPU image: built by buildah from the unchanged Dockerfile, and its files mounted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.image.base_image import DOCKERFILE
from tests.image.pip_settings import PipSettings, has_cpu_torch
from tests.image.storage import FOLDER, ROOT, buildah

__all__ = ["BuiltImage", "build_image"]

_PYPI = "https://pypi.org/simple"


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
