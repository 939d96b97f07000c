"""Compares the fields of a RayService in our schema with those of KubeRay's definition.

    kubectl get crd rayservices.ray.io -o json > crd.json
    python -m tests.deploy.kuberay_fields crd.json

The definition, of a megabyte, is not in this repository: `DIGEST` is that of its fields at v1.7.0,
down to the types of Kubernetes, such as pod templates.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.schemas import custom_resource_schema

__all__ = ["DIGEST", "definition_fields", "differences", "digest", "schema_fields"]

DIGEST = "b0bc34cb49ca4267d14ddaa2ab4002d07e4afda0678e8fa70569f1a35ece0b09"

# Any: JSON schemas.
Schema = dict[str, Any]


def schema_fields() -> set[str]:
    """Return the paths of all fields in our schema, `[]` for the items of a list."""
    whole = custom_resource_schema()
    return set(_walk(whole["$defs"]["RayService"]["properties"]["spec"], "spec", whole, None))


def definition_fields(definition: Schema) -> set[str]:
    """Return the same of KubeRay's definition, not deeper than our schema goes."""
    [version] = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    ours = schema_fields()
    inner = {path.rpartition(".")[0] for path in ours}
    return set(_walk(spec, "spec", definition, inner))


def differences(definition: Schema) -> list[str]:
    """Return a line for each field that only one of the two has."""
    ours, theirs = schema_fields(), definition_fields(definition)
    return [
        *(f"KubeRay has {path}, which our schema lacks." for path in sorted(theirs - ours)),
        *(f"Our schema has {path}, which KubeRay lacks." for path in sorted(ours - theirs)),
    ]


def digest(fields: set[str]) -> str:
    """Return the digest of a set of fields."""
    return hashlib.sha256("\n".join(sorted(fields)).encode()).hexdigest()


def _walk(schema: Schema, path: str, whole: Schema, inner: set[str] | None) -> list[str]:
    """Return the paths below a schema; only those in `inner` are looked into, if it is given."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "array":
        return _walk(schema.get("items", {}), f"{path}[]", whole, inner)
    if inner is not None and path not in inner:
        return []
    found = []
    for name, part in schema.get("properties", {}).items():
        found += [f"{path}.{name}", *_walk(part, f"{path}.{name}", whole, inner)]
    return found


def main() -> int:
    # YAML includes JSON.
    definition = yaml.load(Path(sys.argv[1]).read_text(), yaml.CSafeLoader)
    lines = differences(definition)
    print("\n".join(lines) or "Our schema has the fields of this KubeRay.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
