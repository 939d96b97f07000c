"""Our deployments pass the rules that KubeRay's operator checks beyond its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.kustomize import overlay, set_at
from tests.deploy.rules.operator_rules import operator_errors

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest


def test_the_operator_accepts_the_service(ray_service: Manifest) -> None:
    assert operator_errors(ray_service) == []


_CLUSTER = "spec/rayClusterConfig"
_HEAD = f"{_CLUSTER}/headGroupSpec"
_HEAD_CONTAINER = f"{_HEAD}/template/spec/containers/0"
_RANKS = f"{_CLUSTER}/workerGroupSpecs/0"
_STEPS = {"stepSizePercent": 25, "intervalSeconds": 1, "gatewayClassName": "envoy"}
_NO_AUTOSCALER = (f"{_CLUSTER}/enableInTreeAutoscaling", None)


def _set(name: str) -> tuple[str, dict[str, str]]:
    return f"{_HEAD_CONTAINER}/env/-", {"name": name, "value": "1"}


def _state(**options: object) -> tuple[str, dict[str, object]]:
    return f"{_CLUSTER}/gcsFaultToleranceOptions", {"backend": "rocksdb", **options}


def _upgrade(**options: object) -> tuple[str, dict[str, object]]:
    return "spec/upgradeStrategy", {"type": "NewClusterWithIncrementalUpgrade", **options}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([(f"{_HEAD}/resources", {"CPU": "1"})], "resources in two places"),
        ([(f"{_HEAD}/rayStartParams/labels", "a=b")], "labels in rayStartParams"),
        ([(f"{_RANKS}/template/spec/containers", [])], "ranks has no container"),
        ([(f"{_RANKS}/suspend", True)], "cannot be suspended under an autoscaler"),
        ([(f"{_RANKS}/template/spec/restartPolicy", "Always")], "restartPolicy of ranks"),
        ([(f"{_RANKS}/replicas", 9)], "min <= replicas <= max"),
        ([_NO_AUTOSCALER, (f"{_RANKS}/priority", 1)], "priority of ranks needs"),
        (
            [_NO_AUTOSCALER, _upgrade(clusterUpgradeOptions=_STEPS)],
            "needs the autoscaler",
        ),
        ([_upgrade()], "clusterUpgradeOptions"),
        (
            [_upgrade(clusterUpgradeOptions=_STEPS | {"maxSurgePercent": 20})],
            "at most maxSurgePercent",
        ),
        ([(f"{_CLUSTER}/upgradeStrategy", {"type": "Recreate"})], "no upgradeStrategy of its own"),
        ([_set("RAY_REDIS_ADDRESS")], "Redis is configured by gcsFaultToleranceOptions"),
        ([_set("RAY_enable_autoscaler_v2")], "version is in autoscalerOptions"),
        ([_state(), _set("RAY_gcs_storage")], "KubeRay sets where the state is"),
        ([_state(backend="redis", storage={"size": "2Gi"})], "Redis has no storage"),
        ([_state(redisAddress="redis:6379")], "rocksdb has no ['redisAddress']"),
        ([_state(storage={"claimName": "state", "size": "2Gi"})], "a claim of one's own"),
        (
            [_state(), (f"{_HEAD_CONTAINER}/volumeMounts/-", {"mountPath": "/data/gcs"})],
            "/data/gcs is for the state",
        ),
        (
            [(f"{_CLUSTER}/authOptions/enableK8sTokenAuth", True)],
            "cannot have Kubernetes check its tokens",
        ),
        ([("metadata/name", "p" * 48)], "at most 47 characters"),
        ([(f"{_CLUSTER}/rayVersion", None)], "rayVersion of at least 2.52.0"),
        ([(f"{_HEAD}/headService", {"metadata": {"name": "head"}})], "no name of its own"),
        (
            [(f"{_CLUSTER}/networkPolicy", {"mode": "DenyAll"})],
            "networkPolicy needs a feature gate",
        ),
    ],
)
def test_the_operator_reports_errors(changes: list[tuple[str, object]], error: str) -> None:
    service = overlay("gpu-1")["RayService", "pagedray"]
    for path, value in changes:
        set_at(service, path, value)
    [found] = operator_errors(service)
    assert error in found


def test_groups_have_different_names() -> None:
    service = overlay("gpu-1")["RayService", "pagedray"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    groups.append(groups[0])
    assert "two worker groups have one name" in str(operator_errors(service))
