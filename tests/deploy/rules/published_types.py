"""Checks custom resources by TypeScript types that others generate from their projects' sources.

They are independent of our own schemas. A literal of TypeScript may have known fields only, at any
depth.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.deploy.kustomize import DEPLOY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

__all__ = ["has_published_type", "needs_types", "type_errors"]

_MODULES = DEPLOY.parent / "build/tools/types/node_modules"

needs_types = pytest.mark.skipif(
    not _MODULES.exists() and "CI" not in os.environ, reason="needs make deploy-tools"
)

_PACKAGES = {
    "gateway.networking.k8s.io": "gateway-api",
    "keda.sh": "keda",
    "monitoring.coreos.com": "prometheus-operator",
}
_OPTIONS = {
    "module": "nodenext",
    "noEmit": True,
    "skipLibCheck": True,
    "strict": True,
    "target": "es2022",
    "types": [],
}


def has_published_type(manifest: Manifest) -> bool:
    """Whether a manifest is of a kind that the packages define."""
    return _group(manifest) in _PACKAGES


def type_errors(manifests: Sequence[Manifest], folder: Path) -> list[str]:
    """Return what the compiler says of manifests, which have published types."""
    (folder / "node_modules").symlink_to(_MODULES)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": _OPTIONS}))
    lines = [line for number, one in enumerate(manifests) for line in _source(number, one)]
    (folder / "manifests.ts").write_text("\n".join(lines))
    run = subprocess.run(
        [_MODULES / ".bin/tsc", "--project", str(folder), "--pretty", "false"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    errors = run.stdout.splitlines()
    assert (run.returncode == 0) == (not errors), run.stderr
    return errors


def _source(number: int, manifest: Manifest) -> list[str]:
    group, kind = _group(manifest), manifest["kind"]
    version = manifest["apiVersion"].rpartition("/")[2]
    module = f"@kubernetes-models/{_PACKAGES[group]}/{group}/{version}/{kind}"
    return [
        f'import type {{ I{kind} as Type{number} }} from "{module}";',
        # JSON is a literal of TypeScript.
        f"export const manifest{number}: Type{number} = {json.dumps(manifest)};",
    ]


def _group(manifest: Manifest) -> str:
    group: str = manifest["apiVersion"].rpartition("/")[0]
    return group
