"""Compares the fields of a RayService in our schema with those of KubeRay's definition.

    kubectl get crd rayservices.ray.io -o json > crd.json
    python -m tests.deploy.rules.kuberay_fields crd.json

The definition, of a megabyte, is not in this repository: `DIGEST` is that of its fields and their
types at v1.7.0, down to the types of Kubernetes, such as pod templates.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.rules.schemas import custom_resource_schema

__all__ = ["DIGEST", "Fields", "definition_fields", "differences", "digest", "schema_fields"]

DIGEST = "d8e55d9f098e457738b81cc0cdc66c73c90e0a70de56cb0e68de49a53129f643"

# Any: JSON schemas.
Schema = dict[str, Any]
Fields = dict[str, str]
"""The type of each field by its path, `[]` for the items of a list."""

_LISTS = {"EgressRules", "EnvFrom", "EnvVars", "IngressRules", "IngressTLS", "VolumeMounts"}
"""What our schema names of the lists of Kubernetes; all else are objects."""


def schema_fields() -> Fields:
    """Return all fields of our schema."""
    whole = custom_resource_schema()
    return _walk(whole["$defs"]["RayService"]["properties"]["spec"], "spec", whole, None)


def definition_fields(definition: Schema) -> Fields:
    """Return those of KubeRay's definition, not deeper than our schema goes."""
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    ours = schema_fields()
    inner = {path.rpartition(".")[0] for path in ours}
    return _walk(spec, "spec", definition, inner)


def differences(definition: Schema) -> list[str]:
    """Return a line for each field that only one of the two has, or that has another type."""
    ours, theirs = schema_fields(), definition_fields(definition)
    return [
        *(f"KubeRay has {path}, which our schema lacks." for path in sorted(theirs.keys() - ours)),
        *(f"Our schema has {path}, which KubeRay lacks." for path in sorted(ours.keys() - theirs)),
        *(
            f"{path} is {theirs[path]} in KubeRay and {ours[path]} in our schema."
            for path in sorted(ours.keys() & theirs)
            if ours[path] != theirs[path]
        ),
    ]


def digest(fields: Fields) -> str:
    """Return the digest of fields and their types."""
    lines = (f"{path} {kind}" for path, kind in sorted(fields.items()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _walk(schema: Schema, path: str, whole: Schema, inner: set[str] | None) -> Fields:
    """Return the fields below a schema; only those in `inner` are looked into, if it is given."""
    schema = _resolved(schema, whole)
    if schema.get("type") == "array":
        return _walk(schema.get("items", {}), f"{path}[]", whole, inner)
    if inner is not None and path not in inner:
        return {}
    found: Fields = {}
    for name, part in schema.get("properties", {}).items():
        found[f"{path}.{name}"] = _type(_resolved(part, whole))
        found |= _walk(part, f"{path}.{name}", whole, inner)
    return found


def _resolved(schema: Schema, whole: Schema) -> Schema:
    found: Schema = schema
    if "$ref" in schema:
        found = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _type(schema: Schema) -> str:
    """Return the type of a field, by our schema or by the one of a definition."""
    if "x-kubernetes" in schema:
        return "array" if schema["x-kubernetes"] in _LISTS else "object"
    if schema.get("x-kubernetes-int-or-string") or isinstance(schema.get("type"), list):
        return "integer or string"
    # Our enumerations have no type, and all of them are of strings.
    return str(schema.get("type", "string"))


def main() -> int:
    """Print the differences; return 1 if there are some."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("definition", type=Path, help="KubeRay's definition, in JSON or YAML")
    # YAML includes JSON.
    definition = yaml.load(parser.parse_args().definition.read_text(), yaml.CSafeLoader)
    lines = differences(definition)
    print("\n".join(lines) or "Our schema has the fields of this KubeRay.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
