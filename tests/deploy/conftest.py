"""Fixtures of the tests of deploy/: all deployments that a user may apply, rendered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.kustomize import DEPLOY, render, write_overlay

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

_SINGLE_POD = DEPLOY / "single-pod"
_COMPONENTS = sorted(
    path.parent
    for path in DEPLOY.glob("*/components/*/kustomization.yaml")
    # Those that overlays have.
    if path.parent.name not in ("autoscaling", "models")
)
OVERLAYS = sorted(path.parent for path in DEPLOY.glob("kuberay/overlays/*/kustomization.yaml"))


@pytest.fixture(params=[*OVERLAYS, _SINGLE_POD], ids=lambda path: path.name)
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
    return write_overlay(
        tmp_path, DEPLOY / "kuberay/overlays/gpu-1", DEPLOY / "kuberay/components/monitoring"
    )


@pytest.fixture
def monitored(monitored_folder: Path) -> list[Manifest]:
    """The manifests of that overlay."""
    return render(monitored_folder)


@pytest.fixture(params=_COMPONENTS, ids=lambda path: "-".join(path.relative_to(DEPLOY).parts[::2]))
def extended_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A user's overlay with each of our components: of sixteen GPUs, or of a single pod."""
    component: Path = request.param
    is_single = component.is_relative_to(_SINGLE_POD)
    base = _SINGLE_POD if is_single else DEPLOY / "kuberay/overlays/tp-16"
    return write_overlay(tmp_path, base, component)


@pytest.fixture
def extended(extended_folder: Path) -> list[Manifest]:
    """The manifests of that overlay."""
    return render(extended_folder)


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def ray_service(request: pytest.FixtureRequest) -> Manifest:
    """The RayService of each overlay."""
    [found] = [one for one in render(request.param) if one["kind"] == "RayService"]
    return found
