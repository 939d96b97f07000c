"""Values that Helm rejects, by the schema and the rules of the chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.helm.chart import needs_helm, run_helm

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

pytestmark = needs_helm

_HUB = {"model": "Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, "model"),
        ({"model": "/models/../etc"}, "model"),
        (_HUB | {"replicas": 1.5}, "replicas"),
        (_HUB | {"gpusPerHost": -1}, "gpusPerHost"),
        (_HUB | {"hfToken": "hf_secret"}, "hfToken"),
        (_HUB | {"arguments": {"num_block": 1}}, "num_block"),
        (_HUB | {"tensorParallelSize": 12, "gpusPerHost": 8}, "12 ranks"),
        (_HUB | {"storage": {"accessMode": "ReadOnlyMany"}}, "storage.accessMode"),
        (_HUB | {"upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}}, "autoscaler"),
        (
            _HUB
            | {
                "maxReplicas": 2,
                "upgrade": {
                    "strategy": "NewClusterWithIncrementalUpgrade",
                    "incremental": {"gatewayClassName": "a", "maxSurgePercent": 20},
                },
            },
            "stepSizePercent: KubeRay rejects 25",
        ),
        (_HUB | {"gcs": {"faultTolerance": "rocksdb"}}, "GCSFaultToleranceEmbeddedStorage"),
        (_HUB | {"gateway": {"enabled": True}}, "gateway.name"),
        (_HUB | {"gateway": {"inferencePool": {"enabled": True}}}, "it needs gateway.enabled"),
        (
            _HUB
            | {
                "maxReplicas": 2,
                "gateway": {"enabled": True, "name": "one"},
                "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"},
            },
            "has none for gRPC",
        ),
        (
            _HUB | {"maxReplicas": 2, "upgrade": {"strategy": "NewClusterWithIncrementalUpgrade"}},
            "needs a GatewayClass",
        ),
        (_HUB | {"maxReplicas": 1, "replicas": 2}, "maxReplicas: it must be 0"),
        ({"model": "/models"}, "model: write a folder below /models"),
        (_HUB | {"graceSeconds": 100}, "graceSeconds: 100"),
        ({"model": "a b"}, "model"),
        ({"model": "/models/'x'"}, "model"),
        (_HUB | {"worker": {"cpu": 8}}, "worker.cpu"),
        (_HUB | {"worker": {"nodeSelector": {"gpu": False}}}, "worker.nodeSelector.gpu"),
        (_HUB | {"download": {"token": "hf_secret"}}, "token"),
        (_HUB | {"storage": {"image": "a:1"}}, "would be downloaded, but storage.image"),
        (
            {"model": "/models/a", "storage": {"image": "a:1", "existingClaim": "b"}},
            "two sources",
        ),
        ({"model": "/opt/a", "storage": {"image": "a:1"}}, "is not in storage.image"),
        (_HUB | {"storage": {"subPath": "/a"}}, "storage.subPath"),
        (_HUB | {"storage": {"subPath": "a/../b"}}, "storage.subPath"),
        ({"model": "/opt/a", "storage": {"subPath": "a"}}, "storage.subPath: nothing would use it"),
        ({"model": "/opt/a", "storage": {"existingClaim": "a"}}, "storage.existingClaim: nothing"),
        (
            {"model": "/models/a", "storage": {"image": "a:1", "subPath": "b"}},
            "storage.subPath: it is a folder of a claim",
        ),
        (
            _HUB | {"storage": {"existingClaim": "a", "storageClassName": "b"}},
            "storage.storageClassName: it is for a claim",
        ),
    ],
)
def test_helm_rejects_values(changes: Manifest, error: str) -> None:
    run = run_helm(None, changes)
    assert run.returncode != 0
    assert error in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("image: {tag: 08}", "image.tag"),
        ("image: {tag: 0.10}", "image.tag"),
        ("image: {tag: 1:30}", "image.tag"),
        ("worker: {cpu: 08}", "worker.cpu"),
        ("worker: {nodeSelector: {gpu: yes}}", "worker.nodeSelector.gpu"),
        ("storage: {storageClassName: no}", "storage.storageClassName"),
        ("gangScheduler: {queue: off}", "gangScheduler.queue"),
    ],
)
def test_helm_rejects_text_that_yaml_reads_as_something_else(text: str, path: str) -> None:
    run = run_helm(None, f"model: a/b\n{text}\n")
    assert run.returncode != 0
    assert f"- {path}: " in run.stderr
