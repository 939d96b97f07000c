"""The volumes of a pod as the kubelet prepares them, made of memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.deploy.quantity import parse_quantity

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

__all__ = ["Secrets", "make_volumes"]

Secrets = dict[str, dict[str, str]]
"""The keys and values of Secrets by name."""


def make_volumes(pod: Manifest, folder: Path, secrets: Secrets) -> dict[str, Path]:
    """Mount the volumes of a pod below a folder and return where, by name.

    A write beyond the limit of an `emptyDir` fails, where the kubelet would evict the pod.
    """
    group = pod["spec"]["securityContext"]["fsGroup"]
    made = {}
    for volume in pod["spec"]["volumes"]:
        path = folder / volume["name"]
        path.mkdir(parents=True)
        match volume:
            case {"emptyDir": {"sizeLimit": limit}}:
                _mount(path, parse_quantity(limit))
                os.chown(path, 0, group)
                path.chmod(0o2777)
            case {"secret": secret}:
                _mount(path, 1 << 20)
                _write_secret(path, secret, secrets[secret["secretName"]], group)
            case _:
                raise AssertionError(f"unknown kind of volume: {volume}")
        made[volume["name"]] = path
    return made


def _mount(path: Path, num_bytes: int) -> None:
    options = f"size={num_bytes},mode=0755,nosuid,nodev"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)


def _write_secret(path: Path, secret: Manifest, values: dict[str, str], group: int) -> None:
    """Write files behind two symbolic links, which the kubelet changes atomically."""
    data = path / "..2026_01_01_00_00_00.1"
    data.mkdir()
    os.chown(data, 0, group)
    data.chmod(0o2755)
    for name, value in values.items():
        file = data / name
        file.write_text(value)
        os.chown(file, 0, group)
        file.chmod(secret["defaultMode"])
        (path / name).symlink_to(Path("..data", name))
    (path / "..data").symlink_to(data.name)
    os.chown(path, 0, group)
    path.chmod(0o3777)
