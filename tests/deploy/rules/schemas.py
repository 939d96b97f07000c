"""Validates manifests by Kubernetes' own schemas, or by ours for custom resources.

The package kubernetes-validate has the schemas; its own function reads megabytes at every call.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml
from referencing import Registry, Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.deploy.kustomize import Manifest

__all__ = ["KUBERNETES", "check", "custom_resource_schema"]

KUBERNETES = ("1.33.0", "1.37.0")
"""The oldest and the newest Kubernetes version to validate for."""
_SCHEMA = Path(__file__).with_name("custom_resources.schema.yaml")


def check(manifest: Manifest) -> None:
    """Raise ValidationError unless a manifest is valid, without unknown fields."""
    if manifest["kind"] in custom_resource_schema()["$defs"]:
        _Validator({"$ref": f"#/$defs/{manifest['kind']}", **custom_resource_schema()}).validate(
            manifest
        )
    else:
        _check_built_in(manifest)


def _check_built_in(manifest: Manifest) -> None:
    group = re.sub(r"^([^./]*)(\.[^/]*)?/", r"\1-", manifest["apiVersion"])
    for version in KUBERNETES:
        _built_in(version, f"{manifest['kind'].lower()}-{group}.json").validate(manifest)


@cache
def _built_in(version: str, name: str) -> jsonschema.Draft202012Validator:
    schema = _read(version, name)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


# Any: JSON.
@cache
def _definitions(version: str) -> Registry[Any]:
    registry: Registry[Any] = Registry()
    return (Resource.from_contents(_read(version, "_definitions.json")) @ registry).crawl()


def _read(version: str, name: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema"
    return json.loads((folder / f"v{version}-local-strict" / name).read_text())


@cache
def custom_resource_schema() -> Manifest:
    """Return our schema of the custom resources."""
    schema: Manifest = yaml.safe_load(_SCHEMA.read_text())
    return schema


def _container(**fields: Any) -> Manifest:
    return _pod({"spec": {"containers": [{"name": "one", "image": "one", **fields}]}})


def _pod(template: Manifest) -> Manifest:
    return {"apiVersion": "v1", "kind": "Pod", **template}


def _network_policy(**rules: Any) -> Manifest:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "spec": {"podSelector": {}, **rules},
    }


# A built-in type has a schema only as part of a kind, so a whole object is validated.
_WHOLES: dict[str, Callable[[Any], Manifest]] = {
    "HorizontalPodAutoscalerBehavior": lambda part: {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "spec": {
            "behavior": part,
            "maxReplicas": 1,
            "scaleTargetRef": {"kind": "Deployment", "name": "one"},
        },
    },
    "EgressRules": lambda part: _network_policy(egress=part),
    "EnvFrom": lambda part: _container(envFrom=part),
    "EnvVarSource": lambda part: _container(env=[{"name": "ONE", "valueFrom": part}]),
    "EnvVars": lambda part: _container(env=part),
    "IngressRules": lambda part: _network_policy(ingress=part),
    "IngressTLS": lambda part: {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "spec": {"tls": part},
    },
    "PodTemplateSpec": _pod,
    "ResourceRequirements": lambda part: _container(resources=part),
    "SecurityContext": lambda part: _container(securityContext=part),
    "Service": lambda part: {"apiVersion": "v1", "kind": "Service", **part},
    "VolumeMounts": lambda part: _container(volumeMounts=part),
}


# Any: the signature of a keyword in jsonschema.
def _kubernetes_keyword(
    validator: Any, kind: str, part: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    try:
        _check_built_in(_WHOLES[kind](part))
    except jsonschema.ValidationError as error:
        yield jsonschema.ValidationError(f"{kind}: {error.json_path}: {error.message}")


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]  # its stubs have none
    jsonschema.Draft202012Validator, {"x-kubernetes": _kubernetes_keyword}
)
