"""Buildah with a storage of its own in build/image, so that it leaves no images elsewhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["FOLDER", "ROOT", "buildah"]

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
