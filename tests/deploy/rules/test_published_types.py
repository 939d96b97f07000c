"""Custom resources match types that others publish, which tells when our schemas are wrong."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.deploy.helm.chart import needs_helm, render_chart
from tests.deploy.kustomize import DEPLOY, render, set_at, write_overlay

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

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


pytestmark = [needs_types, needs_helm]
_GATEWAY = {"enabled": True, "name": "one", "namespace": "two", "hostnames": ["llm.example.com"]}


@pytest.fixture
def resources(tmp_path: Path) -> list[Manifest]:
    """One of each kind that the chart and the folders have."""
    single = DEPLOY / "single-pod"
    (tmp_path / "single").mkdir()
    parts = [single / "components" / name for name in ("monitoring", "keda")]
    manifests = [
        *render_chart("gpu-1", {"gateway": _GATEWAY, "monitoring": {"enabled": True}}),
        *render(write_overlay(tmp_path / "single", single, *parts)),
        *render(DEPLOY / "prometheus/operator"),
    ]
    return [one for one in manifests if has_published_type(one)]


def test_custom_resources_match_the_published_types(
    resources: list[Manifest], tmp_path: Path
) -> None:
    assert {one["kind"] for one in resources} == {
        "GRPCRoute",
        "HTTPRoute",
        "PodMonitor",
        "PrometheusRule",
        "ScaledObject",
    }
    assert type_errors(resources, tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("GRPCRoute", "spec/rules/0/matches/0/method/services", "a"),
        ("HTTPRoute", "spec/rules/0/timeouts/requests", "1s"),
        ("HTTPRoute", "spec/rules/0/backendRefs/0/port", "8000"),
        ("PodMonitor", "spec/podMetricsEndpoints/0/ports", "metrics"),
        ("PrometheusRule", "spec/groups/0/rules/0/expression", "up"),
        ("ScaledObject", "spec/triggers/0/kind", "prometheus"),
    ],
)
def test_each_kind_is_checked_strictly(
    resources: list[Manifest], tmp_path: Path, kind: str, path: str, value: str
) -> None:
    wrong = next(one for one in resources if one["kind"] == kind)
    set_at(wrong, path, value)
    [error, *_] = type_errors([wrong], tmp_path)
    assert path.rpartition("/")[2] in error or "not assignable" in error
