"""The name of a release is in the names of all that it has, and Kubernetes limits their lengths."""

from __future__ import annotations

import pytest

from tests.deploy.helm.chart import needs_helm, render_chart, run_helm

pytestmark = needs_helm

_HUB = {"model": "Qwen/Qwen3-8B"}
_MAX_LABEL = 63
"""Of labels, Services and Jobs, which are a label of their pods."""


def test_the_longest_name_fits_everywhere() -> None:
    changes = {
        "autoscaler": {"idleTimeoutSeconds": 60},
        "gateway": {"enabled": True, "name": "one", "inferencePool": {"enabled": True}},
        "maxReplicas": 2,
        "monitoring": {"enabled": True},
    }
    for manifest in render_chart(None, _HUB | changes, release="p" * 47):
        metadata = manifest["metadata"]
        assert len(metadata["name"]) <= _MAX_LABEL, manifest["kind"]
        assert all(len(one) <= _MAX_LABEL for one in metadata.get("labels", {}).values())


@pytest.mark.parametrize("name", ["p" * 48, "1p", "p.q"])
def test_helm_rejects_a_name_that_kuberay_would_reject(name: str) -> None:
    assert "at most 47 lowercase letters" in run_helm(None, _HUB, release=name).stderr
