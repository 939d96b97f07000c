"""Helm 4 renders the chart as Helm 3 does, and rejects the same values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.helm.chart import CHART, VALUES, needs_helm, render_chart, run_helm
from tests.deploy.kustomize import DEPLOY

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

_FOLDER = DEPLOY.parent / "build/tools/helm-4"
_SCRIPT = f"""
import json, sys
from helm_python.chart import Chart
values = json.load(sys.stdin)
chart = Chart.load({str(CHART)!r})
chart.validate_schema(values)
print(json.dumps(chart.render(values, name="pagedray", namespace="default", is_install=True)))
"""
_HUB = {"model": "Qwen/Qwen3-8B"}
_EVERYTHING = _HUB | {
    "arguments": {
        "itl_target_ms": 30.5,
        "max_model_len": 1_000_000,
        "served_model_name": ["one", "two"],
    },
    "diskCache": {"size": "400Gi", "storageClassName": "local"},
    "gateway": {
        "enabled": True,
        "hostnames": ["llm.example.com"],
        "inferencePool": {"enabled": True},
        "name": "one",
    },
    "gcs": {"faultTolerance": "redis"},
    "maxReplicas": 3,
    "monitoring": {"enabled": True},
    "storage": {"subPath": "team/models"},
    "tracing": {"enabled": True},
}

pytestmark = [
    pytest.mark.slow,
    needs_helm,
    pytest.mark.skipif(
        not _FOLDER.exists() and "CI" not in os.environ, reason="needs make helm-4-test"
    ),
]


@pytest.mark.parametrize("name", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_both_render_the_same_of_our_values(name: str) -> None:
    values = yaml.safe_load((VALUES / f"{name}.yaml").read_text())
    assert _by_name(_render(values)) == _by_name(render_chart(name))


@pytest.mark.parametrize(
    "values",
    [
        _HUB,
        _EVERYTHING,
        {"model": "s3://bucket/tiny", "download": {"s3": {"endpoint": "http://minio:9000"}}},
        {"model": "/models", "storage": {"image": "ghcr.io/team/tiny:1"}},
    ],
    ids=["hub", "everything", "s3", "image"],
)
def test_both_render_the_same_of_other_values(values: Manifest) -> None:
    assert _by_name(_render(values)) == _by_name(render_chart(None, values))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "/models/../etc"}, "/model"),
        ({"replicas": 1.5}, "/replicas"),
        ({"gpusPerHost": -1}, "/gpusPerHost"),
        ({"hfToken": "hf_secret"}, "hfToken"),
        ({"worker": {"cpu": 8}}, "/worker/cpu"),
        ({"worker": None}, "worker"),
        ({"arguments": {"max_num_seqs": "many"}}, "/arguments/max_num_seqs"),
        ({"diskCache": {"size": "400G"}}, "/diskCache/size"),
        ({"graceSeconds": 100}, "graceSeconds: 100 would end a pod"),
    ],
)
def test_both_reject_the_same(changes: Manifest, error: str) -> None:
    values = _HUB | changes
    run = _run(values)
    assert run.returncode != 0
    assert error in run.stderr
    assert run_helm(None, values).returncode != 0


def test_the_notes_name_the_service_and_the_key() -> None:
    run = _run(_HUB)
    notes = json.loads(run.stdout)["pagedray/templates/NOTES.txt"]
    assert "port-forward service/pagedray-serve-svc 8000 9000" in notes
    assert "get secret pagedray-client-key" in notes


def _render(values: Manifest) -> list[Manifest]:
    run = _run(values)
    assert run.returncode == 0, run.stderr
    texts = [text for name, text in json.loads(run.stdout).items() if name.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]


def _run(values: Manifest) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(_FOLDER)},
    )


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    # A new key is random.
    return {
        (one["kind"], one["metadata"]["name"]): {
            name: part for name, part in one.items() if name != "stringData"
        }
        for one in manifests
    }
