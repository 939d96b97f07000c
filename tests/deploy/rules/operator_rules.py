"""The rules for RayServices that KubeRay v1.7.0 checks beyond its schema.

Its schema's CEL rules and ray-operator/controllers/ray/utils/validation.go, as far as they concern
what a RayService can say.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.kustomize import Manifest

__all__ = ["operator_errors"]

_MAX_NAME_LENGTH = 47
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_OLDEST_WITH_TOKENS = (2, 52)
_STATE_FOLDER = "/data/gcs"
_RESOURCE_PARAMS = {"memory", "num-cpus", "num-gpus", "resources"}
_GATED = ("historyServerOptions", "networkPolicy", "tlsOptions")
"""Fields of a cluster that need a feature gate, which is off by default."""


def operator_errors(ray_service: Manifest) -> list[str]:
    """Return the errors that the operator would report."""
    return [*_metadata(ray_service), *_service(ray_service), *_cluster(ray_service)]


def _metadata(ray_service: Manifest) -> Iterator[str]:
    name = ray_service["metadata"]["name"]
    if len(name) > _MAX_NAME_LENGTH or not _DNS_LABEL.fullmatch(name):
        yield f"the name {name!r} is no DNS label of at most {_MAX_NAME_LENGTH} characters"


def _service(ray_service: Manifest) -> Iterator[str]:
    spec = ray_service["spec"]
    cluster = spec["rayClusterConfig"]
    if spec.get("upgradeStrategy", {}).get("type") == "NewClusterWithIncrementalUpgrade":
        if not cluster.get("enableInTreeAutoscaling"):
            yield "an incremental upgrade needs the autoscaler"
        options = spec["upgradeStrategy"].get("clusterUpgradeOptions")
        if options is None:
            yield "an incremental upgrade needs clusterUpgradeOptions"
        elif options["stepSizePercent"] > options.get("maxSurgePercent", 100):
            yield "a step of an incremental upgrade is to be at most maxSurgePercent"
    if "upgradeStrategy" in cluster:
        yield "the cluster of a RayService has no upgradeStrategy of its own"
    if cluster["headGroupSpec"].get("headService", {}).get("metadata", {}).get("name"):
        yield "the head service may have no name of its own"


def _cluster(ray_service: Manifest) -> Iterator[str]:
    cluster = ray_service["spec"]["rayClusterConfig"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for name, group in (("head", head), *((one["groupName"], one) for one in workers)):
        if not group["template"]["spec"].get("containers"):
            yield f"{name} has no container"
        if group.get("resources") and _RESOURCE_PARAMS & set(group["rayStartParams"]):
            yield f"{name} has resources in two places"
        if "labels" in group["rayStartParams"]:
            yield f"{name} has labels in rayStartParams"
        yield from _restarts(name, group, cluster)
    names = [one["groupName"] for one in workers]
    if len(set(names)) < len(names):
        yield f"two worker groups have one name: {names}"
    for one in workers:
        if not one["minReplicas"] <= one["replicas"] <= one["maxReplicas"]:
            yield f"{one['groupName']} is to have min <= replicas <= max"
        yield from _scaling(one, cluster)
    yield from (f"{name} needs a feature gate" for name in _GATED if name in cluster)
    yield from _environment(cluster)
    yield from _state(cluster)
    yield from _token(cluster)


def _scaling(group: Manifest, cluster: Manifest) -> Iterator[str]:
    is_v2 = cluster.get("autoscalerOptions", {}).get("version", "v2") == "v2"
    if cluster.get("enableInTreeAutoscaling") and is_v2:
        return
    for field in ("idleTimeoutSeconds", "priority"):
        if group.get(field):
            yield f"{field} of {group['groupName']} needs the second autoscaler"


def _restarts(name: str, group: Manifest, cluster: Manifest) -> Iterator[str]:
    if not cluster.get("enableInTreeAutoscaling"):
        return
    # The second version is the default of our Ray version.
    is_v2 = cluster.get("autoscalerOptions", {}).get("version", "v2") == "v2"
    if is_v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
        yield f"the restartPolicy of {name} is to be Never with the second autoscaler"
    if group.get("suspend"):
        yield f"{name} cannot be suspended under an autoscaler"


def _environment(cluster: Manifest) -> Iterator[str]:
    [container, *_] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    env = {one["name"] for one in container.get("env", [])}
    if "RAY_REDIS_ADDRESS" in env:
        yield "Redis is configured by gcsFaultToleranceOptions"
    if {"REDIS_PASSWORD", "REDIS_USERNAME"} & env:
        yield "Redis has its name and password in gcsFaultToleranceOptions"
    if "RAY_enable_autoscaler_v2" in env:
        yield "the autoscaler's version is in autoscalerOptions"


def _state(cluster: Manifest) -> Iterator[str]:
    options = cluster.get("gcsFaultToleranceOptions", {})
    storage = options.get("storage", {})
    if options.get("backend", "redis") != "rocksdb":
        if storage:
            yield "Redis has no storage"
        return
    if others := set(options) - {"backend", "storage"}:
        yield f"rocksdb has no {sorted(others)}"
    if "claimName" in storage and set(storage) & {"size", "storageClassName", "accessModes"}:
        yield "a claim of one's own has its size and class"
    [container, *_] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    if {"RAY_gcs_storage", "RAY_gcs_storage_path"} & {one["name"] for one in container["env"]}:
        yield "KubeRay sets where the state is"
    if any(one["mountPath"] == _STATE_FOLDER for one in container.get("volumeMounts", [])):
        yield f"{_STATE_FOLDER} is for the state"


def _token(cluster: Manifest) -> Iterator[str]:
    options = cluster.get("authOptions", {})
    if options.get("mode") != "token":
        return
    found = re.match(r"(\d+)\.(\d+)\.", cluster.get("rayVersion", ""))
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_WITH_TOKENS:
        yield "authentication by token needs a rayVersion of at least 2.52.0"
    if options.get("enableK8sTokenAuth"):
        yield "a RayService cannot have Kubernetes check its tokens"
