"""All manifests match the schemas of Kubernetes, KubeRay and the Prometheus operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, overlay, set_at
from tests.deploy.rules.kuberay_fields import DIGEST, differences, digest, schema_fields
from tests.deploy.rules.schemas import check, custom_resource_schema

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

LISTS = {"EgressRules", "EnvFrom", "EnvVars", "IngressRules", "IngressTLS", "VolumeMounts"}


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


def definition() -> dict[str, Any]:  # Any: a JSON schema.
    """Return a definition with the fields of our schema, as KubeRay would have it."""
    whole = custom_resource_schema()

    def inlined(part: Any) -> Any:  # Any: as above.
        if isinstance(part, dict) and "$ref" in part:
            return inlined(whole["$defs"][part["$ref"].rpartition("/")[2]])
        if isinstance(part, dict) and "x-kubernetes" in part:
            # KubeRay has the fields of a built-in type in place.
            inner = {"type": "object", "properties": {"more": {"type": "string"}}}
            return {"type": "array", "items": inner} if part["x-kubernetes"] in LISTS else inner
        if isinstance(part, dict) and part.get("type") == ["integer", "string"]:
            return {"x-kubernetes-int-or-string": True}
        if isinstance(part, dict):
            return {name: inlined(one) for name, one in part.items()}
        return part

    spec = inlined(whole["$defs"]["RayService"]["properties"]["spec"])
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    return {"spec": {"versions": [{"name": "v1alpha1"}, {"name": "v1", "schema": schema}]}}


def test_the_fields_of_the_schema_are_those_that_were_recorded() -> None:
    assert digest(schema_fields()) == DIGEST


def test_the_same_fields_are_no_difference() -> None:
    assert differences(definition()) == []


def test_fields_of_another_version_are_named() -> None:
    other = definition()
    spec = other["spec"]["versions"][1]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["suspend"]
    cluster = spec["properties"]["rayClusterConfig"]["properties"]
    cluster["workerGroupSpecs"]["items"]["properties"]["spotOnly"] = {"type": "boolean"}
    assert differences(other) == [
        "KubeRay has spec.rayClusterConfig.workerGroupSpecs[].spotOnly, which our schema lacks.",
        "Our schema has spec.suspend, which KubeRay lacks.",
    ]


def test_another_type_is_a_difference() -> None:
    other = definition()
    spec = other["spec"]["versions"][1]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["suspend"] = {"type": "string"}
    assert differences(other) == ["spec.suspend is string in KubeRay and boolean in our schema."]
