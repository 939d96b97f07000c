"""Our schema of RayServices is that of one version of KubeRay, and a newer one is noticed."""

from __future__ import annotations

from typing import Any

from tests.deploy.rules.kuberay_fields import DIGEST, differences, digest, schema_fields
from tests.deploy.rules.schemas import custom_resource_schema

LISTS = {"EgressRules", "EnvFrom", "EnvVars", "IngressRules", "IngressTLS", "VolumeMounts"}


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
