"""The head and the download may run on other nodes than the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.deploy.helm.chart import needs_helm, render_chart, run_helm
from tests.deploy.rules.schemas import check

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

pytestmark = needs_helm

_HUB = {"model": "Qwen/Qwen3-8B"}
_NODES: Manifest = {
    "nodeSelector": {"pool": "small"},
    "tolerations": [{"key": "small", "operator": "Exists", "effect": "NoSchedule"}],
}


def test_the_head_and_the_job_have_nodes_of_their_own() -> None:
    manifests = render_chart(None, _HUB | {"head": _NODES})
    for manifest in manifests:
        check(manifest)
    head, worker, job = _pods(manifests)
    for pod in (head, job):
        assert {name: pod[name] for name in _NODES} == _NODES
    assert "nodeSelector" not in worker
    assert worker["tolerations"] != _NODES["tolerations"]


def test_by_default_they_run_anywhere() -> None:
    head, _, job = _pods(render_chart(None, _HUB))
    for pod in (head, job):
        assert not _NODES.keys() & pod.keys()


def test_a_field_that_tolerations_do_not_have_is_rejected() -> None:
    run = run_helm(None, _HUB | {"head": {"tolerations": [{"kee": "small"}]}})
    assert run.returncode != 0
    assert "head.tolerations.0" in run.stderr


def _pods(manifests: list[Manifest]) -> tuple[Manifest, Manifest, Manifest]:
    """Return the pods of the head, of the workers and of the Job."""
    by_kind = {one["kind"]: one.get("spec", {}) for one in manifests}
    cluster = by_kind["RayService"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    templates = (cluster["headGroupSpec"], group, by_kind["Job"])
    head, worker, job = (one["template"]["spec"] for one in templates)
    return head, worker, job
