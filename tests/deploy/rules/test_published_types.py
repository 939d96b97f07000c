"""Custom resources match types that others publish, which tells when our schemas are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.helm.chart import needs_helm, render_chart
from tests.deploy.kustomize import DEPLOY, render, set_at, write_overlay
from tests.deploy.rules.published_types import has_published_type, needs_types, type_errors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

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
