"""Renders the manifests of deploy/ by `kubectl kustomize`."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DEPLOY", "Manifest", "overlay", "render", "set_at", "write_overlay"]

# Any: YAML.
Manifest = dict[str, Any]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a folder with a kustomization."""
    is_ours = folder.resolve().is_relative_to(DEPLOY)
    text = _rendered_once(folder) if is_ours else _rendered(folder)
    return list(yaml.load_all(text, yaml.CSafeLoader))


def overlay(name: str) -> dict[tuple[str, str], Manifest]:
    """Return the manifests of an overlay for KubeRay by kind and name."""
    manifests = render(DEPLOY / "kuberay" / "overlays" / name)
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def write_overlay(folder: Path, base: Path, *components: Path) -> Path:
    """Write a user's overlay of a base with components into a folder, and return the folder."""
    start = folder.resolve()
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(base, start)],
        "components": [os.path.relpath(one, start) for one in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


# Any: mappings and lists.
def set_at(manifest: Manifest, path: str, value: Any) -> None:
    """Set a value in a manifest, append to a list at `-`, or delete what is there if it is None."""
    *steps, last = path.split("/")
    place: Any = manifest
    for step in steps:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if last == "-":
        place.append(value)
    elif value is None:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value


def _rendered(folder: Path) -> str:
    command = [str(Path(sys.executable).with_name("kubectl")), "kustomize", str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return done.stdout


_rendered_once = cache(_rendered)
