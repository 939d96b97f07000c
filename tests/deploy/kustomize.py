"""Renders the manifests of deploy/ by `kubectl kustomize`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

__all__ = [
    "DEPLOY",
    "Manifest",
    "needs_tool",
    "overlay",
    "parse_quantity",
    "render",
    "seconds_of",
    "set_at",
    "tool",
    "write_overlay",
]

# Any: YAML.
Manifest = dict[str, Any]
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_INSTALLED = DEPLOY.parent / "build/tools/bin"


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


def parse_quantity(text: str) -> int:
    """Return a quantity in bytes. Raises ValueError for one that is no whole number."""
    found = re.fullmatch(r"([0-9]+)([a-zA-Z]*)", text)
    if found is None or found[2] not in _UNITS | _BINARY_UNITS:
        raise ValueError(f"{text!r} is no whole quantity of bytes")
    return int(found[1]) * (_UNITS | _BINARY_UNITS)[found[2]]


def seconds_of(text: str) -> float:
    """Return a duration in seconds. Raises KeyError for one of several parts."""
    number, unit = re.findall(r"^([0-9]+)(ms|s|m|h)$", text)[0]
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}[unit]


def tool(name: str) -> str:
    """Return the path of a program. Fails the test if it is not installed."""
    found = _find(name)
    assert found is not None, f"{name} is not installed; run make deploy-tools"
    return found


def needs_tool(name: str) -> pytest.MarkDecorator:
    """Skip a test without a program, except under CI, where all of them must be installed."""
    is_skipped = _find(name) is None and "CI" not in os.environ
    return pytest.mark.skipif(is_skipped, reason=f"needs {name}; run make deploy-tools")


def _find(name: str) -> str | None:
    return shutil.which(name, path=_INSTALLED) or shutil.which(name)
