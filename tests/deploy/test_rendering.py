"""The deployments are written in what our renderer knows, and kubectl makes the same of them."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, RenderError, render

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def test_every_deployment_is_rendered(manifests: list[Manifest]) -> None:
    assert {"NetworkPolicy", "PodDisruptionBudget"} < {one["kind"] for one in manifests}


@needs_kubectl
def test_kubectl_renders_the_same(folder: Path, manifests: list[Manifest]) -> None:
    assert _by_name(_rendered_by_kubectl(folder)) == _by_name(manifests)


@needs_kubectl
def test_kubectl_renders_monitoring_the_same(
    monitored_folder: Path, monitored: list[Manifest]
) -> None:
    assert _by_name(_rendered_by_kubectl(monitored_folder)) == _by_name(monitored)


def test_the_rules_are_those_that_were_checked(monitored: list[Manifest]) -> None:
    rules = _by_name(monitored)["PrometheusRule", "pagedray"]["spec"]
    assert rules == yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"namePrefix": "a-"}, "namePrefix"),
        ({"patches": [{"patch": "x"}]}, "a patch has a path"),
        ({"kind": "Component"}, "is no Kustomization"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, said: Manifest, complaint: str) -> None:
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **said,
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    with pytest.raises(RenderError, match=complaint):
        render(tmp_path)


def _rendered_by_kubectl(folder: Path) -> list[Manifest]:
    command = ["kubectl", "kustomize", str(folder)]
    text = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    return list(yaml.safe_load_all(text))


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): one for one in manifests}
