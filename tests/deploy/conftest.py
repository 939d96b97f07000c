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
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    """The manifests of each deployment."""
    return render(request.param)


@pytest.fixture
def monitored(tmp_path: Path) -> list[Manifest]:
    """The manifests of a user's overlay: one of ours with monitoring."""
    base, component = "kuberay/overlays/gpu-1", "kuberay/components/monitoring"
    return render(write_overlay(tmp_path, DEPLOY / base, DEPLOY / component))


@pytest.fixture(params=_COMPONENTS, ids=lambda path: "-".join(path.relative_to(DEPLOY).parts[::2]))
def extended(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    """The manifests of a user's overlay with each component: of sixteen GPUs, or a single pod."""
    component: Path = request.param
    is_single = component.is_relative_to(_SINGLE_POD)
    base = _SINGLE_POD if is_single else DEPLOY / "kuberay/overlays/tp-16"
    return render(write_overlay(tmp_path, base, component))


@pytest.fixture(params=OVERLAYS, ids=lambda path: path.name)
def ray_service(request: pytest.FixtureRequest) -> Manifest:
    """The RayService of each overlay."""
    [found] = [one for one in render(request.param) if one["kind"] == "RayService"]
    return found
