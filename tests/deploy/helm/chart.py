"""Renders the Helm chart with Helm itself."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import yaml

from tests.deploy.kustomize import DEPLOY, needs_tool, tool

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

__all__ = ["CHART", "VALUES", "needs_helm", "render_chart", "run_helm"]

CHART = DEPLOY / "helm" / "pagedray"
VALUES = DEPLOY / "helm" / "values"

needs_helm = needs_tool("helm")


def run_helm(
    name: str | None, changes: Manifest | str | None = None, *, release: str = "pagedray"
) -> subprocess.CompletedProcess[str]:
    """Render the chart with one of our files of values, and with changes to it, or with YAML."""
    files = [] if name is None else ["--values", str(VALUES / f"{name}.yaml")]
    command = [tool("helm"), "template", release, str(CHART), "--kube-version", "1.33.0", *files]
    return subprocess.run(
        # JSON is YAML.
        [*command, "--values", "-"],
        input=changes if isinstance(changes, str) else json.dumps(changes or {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def render_chart(
    name: str | None, changes: Manifest | None = None, *, release: str = "pagedray"
) -> list[Manifest]:
    """Return the manifests of the chart."""
    run = run_helm(name, changes, release=release)
    assert run.returncode == 0, run.stderr
    return [one for one in yaml.safe_load_all(run.stdout) if one is not None]
