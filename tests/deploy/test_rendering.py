"""Our renderer supports all deployments, and renders the same as kubectl."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, RenderError, render
from tests.deploy.tools import needs_tool, tool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

needs_kubectl = needs_tool("kubectl")


def test_every_deployment_is_rendered(manifests: list[Manifest]) -> None:
    assert {"NetworkPolicy", "PodDisruptionBudget"} < {one["kind"] for one in manifests}


@needs_kubectl
def test_kubectl_renders_the_same(folder: Path, manifests: list[Manifest]) -> None:
    assert _by_name(_rendered_by_kubectl(folder)) == _by_name(manifests)


@needs_kubectl
def test_kubectl_renders_components_the_same(
    extended_folder: Path, extended: list[Manifest]
) -> None:
    assert _by_name(_rendered_by_kubectl(extended_folder)) == _by_name(extended)


@needs_kubectl
def test_kubectl_renders_monitoring_the_same(
    monitored_folder: Path, monitored: list[Manifest]
) -> None:
    assert _by_name(_rendered_by_kubectl(monitored_folder)) == _by_name(monitored)


def test_the_rules_are_those_of_the_alerts_file(monitored: list[Manifest]) -> None:
    rules = _by_name(monitored)["PrometheusRule", "pagedray"]["spec"]
    assert rules == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"namePrefix": "a-"}, "namePrefix"),
        ({"patches": [{"patch": "x"}]}, "a patch has a path"),
        ({"kind": "Component"}, "is no Kustomization"),
    ],
)
def test_unsupported_features_are_rejected(tmp_path: Path, said: Manifest, error: str) -> None:
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **said,
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    with pytest.raises(RenderError, match=error):
        render(tmp_path)


def _rendered_by_kubectl(folder: Path) -> list[Manifest]:
    command = [tool("kubectl"), "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, timeout=300).stdout
    return list(yaml.safe_load_all(text))


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}
