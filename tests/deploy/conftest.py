"""Fixtures of the tests of deploy/: all deployments that a user may apply, rendered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, render

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

OVERLAYS = sorted(path.parent for path in DEPLOY.glob("kuberay/overlays/*/kustomization.yaml"))


@pytest.fixture(params=[*OVERLAYS, DEPLOY / "single-pod"], ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest) -> Path:
    """The folder of each deployment."""
    path: Path = request.param
    return path


@pytest.fixture
def manifests(folder: Path) -> list[Manifest]:
    """The manifests of each deployment."""
    return render(folder)


@pytest.fixture
def monitored_folder(tmp_path: Path) -> Path:
    """A user's overlay: one of ours with monitoring."""
    kuberay = os.path.relpath(DEPLOY / "kuberay", tmp_path.resolve())
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{kuberay}/overlays/gpu-1"],
        "components": [f"{kuberay}/components/monitoring"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return tmp_path


@pytest.fixture
def monitored(monitored_folder: Path) -> list[Manifest]:
    """The manifests of that overlay."""
    return render(monitored_folder)


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def ray_service(request: pytest.FixtureRequest) -> Manifest:
    """The RayService of each overlay."""
    [found] = [one for one in render(request.param) if one["kind"] == "RayService"]
    return found
