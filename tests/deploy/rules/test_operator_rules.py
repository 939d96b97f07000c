"""Our deployments pass the rules that KubeRay's operator checks beyond its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.deploy.kustomize import overlay
from tests.deploy.rules.operator_rules import operator_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.deploy.kustomize import Manifest


def test_the_operator_accepts_the_service(ray_service: Manifest) -> None:
    assert operator_errors(ray_service) == []


def _rename(service: Manifest) -> None:
    service["metadata"]["name"] = "p" * 48


def _forget_version(service: Manifest) -> None:
    del service["spec"]["rayClusterConfig"]["rayVersion"]


def _restart_workers(service: Manifest) -> None:
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["template"]["spec"]["restartPolicy"] = "Always"


def _want_more_than_the_most(service: Manifest) -> None:
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = 9


def _name_the_head_service(service: Manifest) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["headService"] = {"metadata": {"name": "head"}}


def _upgrade_by_steps(service: Manifest) -> None:
    service["spec"]["upgradeStrategy"] = {"type": "NewClusterWithIncrementalUpgrade"}


def _upgrade_by_steps_above_the_surge(service: Manifest) -> None:
    options = {"maxSurgePercent": 20, "stepSizePercent": 25, "intervalSeconds": 1}
    service["spec"]["upgradeStrategy"] = {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": {**options, "gatewayClassName": "envoy"},
    }


def _recreate_the_cluster(service: Manifest) -> None:
    service["spec"]["rayClusterConfig"]["upgradeStrategy"] = {"type": "Recreate"}


def _isolate_the_cluster(service: Manifest) -> None:
    service["spec"]["rayClusterConfig"]["networkPolicy"] = {"mode": "DenyAll"}


def _prefer_a_group_without_the_autoscaler(service: Manifest) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    del cluster["enableInTreeAutoscaling"]
    cluster["workerGroupSpecs"][0]["priority"] = 1


def _keep_state(service: Manifest, **options: object) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    cluster["gcsFaultToleranceOptions"] = {"backend": "rocksdb", **options}


def _keep_state_in_two_places(service: Manifest) -> None:
    _keep_state(service, redisAddress="redis:6379")


def _keep_state_in_two_claims(service: Manifest) -> None:
    _keep_state(service, storage={"claimName": "state", "size": "2Gi"})


def _mount_something_over_the_state(service: Manifest) -> None:
    _keep_state(service)
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["volumeMounts"].append({"name": "tmp", "mountPath": "/data/gcs"})


def _state_resources_twice(service: Manifest) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    head["resources"] = {"CPU": "1"}


def _label_by_parameters(service: Manifest) -> None:
    service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["labels"] = "a=b"


def _remove_the_containers(service: Manifest) -> None:
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["template"]["spec"]["containers"] = []


def _repeat_the_group(service: Manifest) -> None:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    groups.append(groups[0])


def _suspend_the_group(service: Manifest) -> None:
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["suspend"] = True


def _upgrade_by_steps_without_the_autoscaler(service: Manifest) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    del cluster["enableInTreeAutoscaling"]
    options = {"stepSizePercent": 5, "intervalSeconds": 1, "gatewayClassName": "envoy"}
    service["spec"]["upgradeStrategy"] = {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": options,
    }


def _set_on_the_head(service: Manifest, name: str) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    head["containers"][0]["env"].append({"name": name, "value": "1"})


def _name_redis_by_variable(service: Manifest) -> None:
    _set_on_the_head(service, "RAY_REDIS_ADDRESS")


def _choose_the_autoscaler_by_variable(service: Manifest) -> None:
    _set_on_the_head(service, "RAY_enable_autoscaler_v2")


def _choose_the_state_by_variable(service: Manifest) -> None:
    _keep_state(service)
    _set_on_the_head(service, "RAY_gcs_storage")


def _store_redis(service: Manifest) -> None:
    _keep_state(service, backend="redis", storage={"size": "2Gi"})


def _ask_kubernetes_for_tokens(service: Manifest) -> None:
    service["spec"]["rayClusterConfig"]["authOptions"]["enableK8sTokenAuth"] = True


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_state_resources_twice, "resources in two places"),
        (_label_by_parameters, "labels in rayStartParams"),
        (_remove_the_containers, "ranks has no container"),
        (_repeat_the_group, "two worker groups have one name"),
        (_suspend_the_group, "cannot be suspended under an autoscaler"),
        (_upgrade_by_steps_without_the_autoscaler, "needs the autoscaler"),
        (_name_redis_by_variable, "Redis is configured by gcsFaultToleranceOptions"),
        (_choose_the_autoscaler_by_variable, "version is in autoscalerOptions"),
        (_choose_the_state_by_variable, "KubeRay sets where the state is"),
        (_store_redis, "Redis has no storage"),
        (_ask_kubernetes_for_tokens, "cannot have Kubernetes check its tokens"),
        (_rename, "at most 47 characters"),
        (_forget_version, "rayVersion of at least 2.52.0"),
        (_restart_workers, "restartPolicy of ranks"),
        (_want_more_than_the_most, "min <= replicas <= max"),
        (_name_the_head_service, "no name of its own"),
        (_upgrade_by_steps, "clusterUpgradeOptions"),
        (_upgrade_by_steps_above_the_surge, "at most maxSurgePercent"),
        (_recreate_the_cluster, "no upgradeStrategy of its own"),
        (_isolate_the_cluster, "networkPolicy needs a feature gate"),
        (_prefer_a_group_without_the_autoscaler, "priority of ranks needs"),
        (_keep_state_in_two_places, "rocksdb has no ['redisAddress']"),
        (_keep_state_in_two_claims, "a claim of one's own"),
        (_mount_something_over_the_state, "/data/gcs is for the state"),
    ],
)
def test_the_operator_reports_errors(change: Callable[[Manifest], None], error: str) -> None:
    service = overlay("gpu-1")["RayService", "pagedray"]
    change(service)
    [found] = operator_errors(service)
    assert error in found
