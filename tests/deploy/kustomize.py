"""Renders the subset of Kustomize that deploy/ uses, and rejects everything else.

That part is: resources, components, images, a namespace, ConfigMaps of files, and JSON patches
(RFC 6902) by kind and name. Where there is a kubectl, a test compares this with what it makes of a
folder.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import yaml

__all__ = ["DEPLOY", "Manifest", "RenderError", "overlay", "render", "write_overlay"]

# Any: YAML.
Manifest = dict[str, Any]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_API_VERSIONS = {
    "Kustomization": "kustomize.config.k8s.io/v1beta1",
    "Component": "kustomize.config.k8s.io/v1alpha1",
}
_KNOWN = {
    "apiVersion",
    "components",
    "configMapGenerator",
    "images",
    "kind",
    "namespace",
    "patches",
    "resources",
}


class RenderError(Exception):
    """A folder uses an unsupported or invalid feature."""


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a folder with a kustomization."""
    return _rendered(folder.resolve(), "Kustomization", [])


def overlay(name: str) -> dict[tuple[str, str], Manifest]:
    """Return the manifests of an overlay for KubeRay by kind and name."""
    manifests = render(DEPLOY / "kuberay" / "overlays" / name)
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}


def write_overlay(folder: Path, base: Path, *components: Path) -> Path:
    """Write a user's overlay of a base with components into a folder, and return the folder."""
    start = folder.resolve()
    kustomization = {
        "apiVersion": _API_VERSIONS["Kustomization"],
        "kind": "Kustomization",
        "resources": [os.path.relpath(base, start)],
        "components": [os.path.relpath(one, start) for one in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return folder


def _rendered(folder: Path, kind: str, manifests: list[Manifest]) -> list[Manifest]:
    said = _read(folder / "kustomization.yaml")
    if said.get("kind") != kind or said.get("apiVersion") != _API_VERSIONS[kind]:
        raise RenderError(f"{folder} is no {kind} of {_API_VERSIONS[kind]}")
    if unknown := set(said) - _KNOWN:
        raise RenderError(f"{folder}: {sorted(unknown)} is not rendered")
    for resource in said.get("resources", []):
        manifests = manifests + _resource(folder / resource)
    for generator in said.get("configMapGenerator", []):
        manifests = [*manifests, _config_map(folder, generator)]
    for component in said.get("components", []):
        manifests = _rendered((folder / component).resolve(), "Component", manifests)
    for patch in said.get("patches", []):
        _patch(folder, patch, manifests)
    for image in said.get("images", []):
        _set_image(manifests, image["name"], image["newName"], image.get("newTag"))
    if "namespace" in said:
        _set_namespace(manifests, said["namespace"])
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    if len(set(names)) < len(names):
        raise RenderError(f"{folder}: two manifests have one kind and name: {sorted(names)}")
    return manifests


def _resource(path: Path) -> list[Manifest]:
    if path.is_dir():
        return render(path)
    # A copy, since the value of a YAML anchor would be one object in several places.
    documents = list(yaml.load_all(path.read_text(), yaml.CSafeLoader))
    return [_copied(document) for document in documents if document is not None]


def _config_map(folder: Path, generator: Manifest) -> Manifest:
    options = generator["options"]
    if set(generator) != {"name", "files", "options"} or not options["disableNameSuffixHash"]:
        raise RenderError(f"{folder}: a ConfigMap is made of files, under its own name")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "labels": options["labels"]},
        "data": {name: (folder / name).read_text() for name in generator["files"]},
    }


def _patch(folder: Path, patch: Manifest, manifests: list[Manifest]) -> None:
    if set(patch) != {"path", "target"} or set(patch["target"]) != {"kind", "name"}:
        raise RenderError(f"{folder}: a patch has a path, and a target with kind and name")
    target = patch["target"]
    found = [
        one
        for one in manifests
        if one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]
    ]
    if len(found) != 1:
        raise RenderError(f"{folder}: {target} is the name of {len(found)} manifests, not of one")
    for operation in _copied(_read(folder / patch["path"])):
        _operate(found[0], operation)


def _operate(manifest: Manifest, operation: Manifest) -> None:
    steps = operation["path"].lstrip("/").split("/")
    *parents, last = (step.replace("~1", "/").replace("~0", "~") for step in steps)
    # Any: mappings and lists.
    place: Any = manifest
    for step in parents:
        place = place[int(step)] if isinstance(place, list) else place[step]
    key = int(last) if isinstance(place, list) and last != "-" else last
    match operation["op"]:
        case "add" if isinstance(place, list):
            place.insert(len(place) if key == "-" else key, operation["value"])
        case "add":
            place[key] = operation["value"]
        case "replace":
            # Read first, since only existing values can be replaced.
            _ = place[key]
            place[key] = operation["value"]
        case "remove":
            del place[key]
        case "test":
            if place[key] != operation["value"]:
                raise RenderError(f"{operation['path']} is {place[key]!r}")
        case other:
            raise RenderError(f"the operation {other!r} is not rendered")


# Any: as in a manifest.
def _set_image(node: Any, name: str, new_name: str, new_tag: str | None) -> None:
    if isinstance(node, list):
        for one in node:
            _set_image(one, name, new_name, new_tag)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("containers", "initContainers"):
                for container in value:
                    found, _, tag = container.get("image", "").partition(":")
                    if found == name:
                        container["image"] = f"{new_name}:{new_tag or tag}"
            else:
                _set_image(value, name, new_name, new_tag)


def _set_namespace(manifests: list[Manifest], namespace: str) -> None:
    for manifest in manifests:
        manifest["metadata"]["namespace"] = namespace
        for subject in manifest.get("subjects", []):
            if subject["kind"] == "ServiceAccount":
                subject["namespace"] = namespace


def _read(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def _copied(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _copied(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_copied(value) for value in node]
    return copy.copy(node)
