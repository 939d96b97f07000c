"""The base of the CPU image, made of this machine's release of Debian.

The Dockerfile asks for Ubuntu from a registry. The tests reach package indexes only, so they give
the name of that image to one that debootstrap makes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["DOCKERFILE", "FOLDER", "ROOT", "base_name", "buildah", "make_base"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "image"
_STORAGE = (
    f"--root={FOLDER / 'storage'}",
    f"--runroot={FOLDER / 'run'}",
    "--storage-driver=overlay",
)


def buildah(command: str, *arguments: str, check: bool = True) -> str:
    """Run a command of buildah and return what it prints."""
    done = subprocess.run(
        ["buildah", *_STORAGE, command, *arguments], check=False, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise AssertionError(f"buildah {command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout


DOCKERFILE = ROOT / "deploy" / "Dockerfile"
_LABEL = "pagedray.debian-release"
_DOCKER_CLEAN = 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };\n'
"""Keeps no packages, as in the images of registries."""


def base_name() -> str:
    """Return the name of the base that the Dockerfile asks for."""
    found = re.search(r"^ARG CPU_BASE=(\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert found is not None
    return found[1]


def make_base(release: str) -> None:
    """Make the base, unless an earlier run has made it."""
    name = base_name()
    if buildah("images", "--quiet", "--filter", f"label={_LABEL}={release}", name, check=False):
        return
    root = FOLDER / "debootstrap"
    shutil.rmtree(root, ignore_errors=True)
    command = ["debootstrap", "--variant=minbase", release, str(root)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / folder)
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(_DOCKER_CLEAN)
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(root), "/")
    buildah("config", "--label", f"{_LABEL}={release}", "--cmd", "/bin/bash", container)
    buildah("commit", "--quiet", "--rm", container, name)
    shutil.rmtree(root)
