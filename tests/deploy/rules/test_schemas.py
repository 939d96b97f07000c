"""All manifests match the schemas of Kubernetes, KubeRay and the Prometheus operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jsonschema
import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, overlay, set_at
from tests.deploy.rules.schemas import check

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest


def test_manifests_match_their_schemas(manifests: list[Manifest]) -> None:
    assert {"NetworkPolicy", "PodDisruptionBudget"} < {one["kind"] for one in manifests}
    for manifest in manifests:
        check(manifest)


def test_the_monitoring_component_matches_its_schemas(monitored: list[Manifest]) -> None:
    by_kind = {manifest["kind"]: manifest for manifest in monitored}
    assert "PodMonitor" in by_kind
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    assert by_kind["PrometheusRule"]["spec"] == alerts
    for manifest in monitored:
        check(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec/rayClusterConfig/authOption", {}),
        ("spec/rayClusterConfig/authOptions/mode", "tokens"),
        ("spec/rayClusterConfig/headGroupSpec/rayStartParams/num-cpus", 0),
        ("spec/rayClusterConfig/workerGroupSpecs/0/numOfHost", 1),
        ("spec/rayClusterConfig/workerGroupSpecs/0/minReplicas", "1"),
        ("spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0/securityContex", {}),
        ("spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0/image", 3),
        ("spec/serveService/spec/ports/0/appProtocoll", "http"),
        ("spec/upgradeStrategy/type", "Rolling"),
        ("spec/serveConfig", ""),
    ],
)
def test_invalid_manifests_are_rejected(path: str, value: object) -> None:
    wrong = overlay("cpu-demo")["RayService", "pagedray"]
    set_at(wrong, path, value)
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)


def test_a_built_in_kind_is_checked_strictly() -> None:
    wrong = overlay("cpu-demo")["NetworkPolicy", "pagedray-deny"]
    wrong["spec"]["policyType"] = []
    with pytest.raises(jsonschema.ValidationError):
        check(wrong)


@pytest.mark.parametrize("name", ["ScaledObject", "HTTPScaledObject"])
def test_unknown_fields_of_scalers_are_rejected(name: str) -> None:
    folder = DEPLOY / "single-pod/components/keda"
    text = (folder / "scaledobject.yaml").read_text()
    [manifest] = [one for one in yaml.safe_load_all(text) if one["kind"] == name]
    check(manifest)
    manifest["spec"]["scaleTargetRef"]["deployment"] = "pagedray"
    with pytest.raises(jsonschema.ValidationError, match="deployment"):
        check(manifest)
