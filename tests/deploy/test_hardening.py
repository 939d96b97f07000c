"""Pods have minimal permissions, images have versions, and terminations have enough time."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from cluster.cli.parser import make_parser
from tests.deploy.kustomize import DEPLOY, overlay, parse_quantity, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.kustomize import Manifest

_USER = 10001

_NUM_PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.1-405B-Instruct": 405_853_388_800,
}
_BYTES_PER_PARAMETER = 2
_GPU_BYTES = 80 * 10**9


def _templates(manifests: list[Manifest]) -> Iterator[Manifest]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["spec"]["template"]
        if manifest["kind"] == "RayService":
            cluster = manifest["spec"]["rayClusterConfig"]
            yield cluster["headGroupSpec"]["template"]
            yield from (group["template"] for group in cluster["workerGroupSpecs"])


def _containers(manifests: list[Manifest]) -> Iterator[Manifest]:
    for template in _templates(manifests):
        yield from template["spec"]["containers"]
        yield from template["spec"].get("initContainers", [])


def _groups(ray_service: Manifest) -> Iterator[Manifest]:
    cluster = ray_service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def test_pods_have_minimal_permissions(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == _USER
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_containers_have_read_only_root_file_systems(manifests: list[Manifest]) -> None:
    for container in _containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"])
        assert not [one for one in container["ports"] if "hostPort" in one]


def test_every_writable_path_is_a_volume(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        [container] = template["spec"]["containers"]
        mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
        for path in ("/tmp", "/dev/shm", "/home/pagedray/.cache"):
            assert volumes[mounts[path]["name"]]["emptyDir"]["sizeLimit"]
        for mount in mounts.values():
            assert mount.get("readOnly") or "emptyDir" in volumes[mount["name"]]


def test_keys_come_from_a_secret_as_a_file(manifests: list[Manifest]) -> None:
    for template in _templates(manifests):
        [secret] = [one["secret"] for one in template["spec"]["volumes"] if "secret" in one]
        assert secret["secretName"] == "pagedray-api-keys"
        # The file's group is the pod's fsGroup.
        assert secret["defaultMode"] == 0o440
    for container in _containers(manifests):
        assert not [one for one in container.get("env", []) if "KEY" in one["name"]]


def test_images_are_of_this_version(manifests: list[Manifest]) -> None:
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    for container in _containers(manifests):
        name, _, tag = container["image"].rpartition(":")
        assert name == "registry.example.com/pagedray"
        assert re.fullmatch(re.escape(project["version"]) + "-(cpu|cuda)", tag)


def test_only_workers_with_gpus_pull_the_cuda_image(ray_service: Manifest) -> None:
    for group in _groups(ray_service):
        [container] = group["template"]["spec"]["containers"]
        has_gpus = "nvidia.com/gpu" in container["resources"]["limits"]
        assert container["image"].endswith("-cuda" if has_gpus else "-cpu")


def test_ray_requires_a_token_and_exposes_no_dashboard(ray_service: Manifest) -> None:
    cluster = ray_service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["headGroupSpec"]["enableIngress"] is False
    assert "headService" not in cluster["headGroupSpec"]
    assert ray_service["spec"]["serveService"]["spec"]["type"] == "ClusterIP"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert "dashboard-host" not in group["rayStartParams"]


def test_nothing_is_exposed_outside_the_cluster(manifests: list[Manifest]) -> None:
    assert not {one["kind"] for one in manifests} & {"Ingress", "Gateway", "HTTPRoute", "GRPCRoute"}
    for manifest in manifests:
        if manifest["kind"] == "Service":
            assert manifest["spec"]["type"] == "ClusterIP"


def test_grpc_is_announced_as_http2(ray_service: Manifest) -> None:
    ports = {one["name"]: one for one in ray_service["spec"]["serveService"]["spec"]["ports"]}
    assert ports["serve-grpc"]["appProtocol"] == "kubernetes.io/h2c"
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    assert ports["serve-grpc"]["port"] == config["grpc_options"]["port"]
    assert ports["serve"]["port"] == config["http_options"]["port"]
    # KubeRay's service has the ports of the head, even if the head does not serve.
    cluster = ray_service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        declared = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert declared["serve-grpc"] == ports["serve-grpc"]["port"]
        assert declared["serve"] == ports["serve"]["port"]


def test_grace_periods_exceed_the_time_to_drain(ray_service: Manifest) -> None:
    spec = ray_service["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    requests_s = application["args"]["drain_timeout_s"]
    cluster = spec["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        wait_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert requests_s < _drain_s(pod)
        assert wait_s + _drain_s(pod) < pod["terminationGracePeriodSeconds"]
    # The old cluster of an upgrade stays until its requests must have ended.
    assert spec["rayClusterDeletionDelaySeconds"] > requests_s


def test_the_head_waits_for_workers_that_drain_and_does_not_drain(ray_service: Manifest) -> None:
    cluster = ray_service["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    [container] = head["containers"]
    program, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
    parsed = make_parser().parse_args(arguments)
    assert (program, parsed.command, parsed.verb) == ("pagedray", "deploy", "hold")
    [gcs] = [one for one in container["ports"] if one["name"] == "gcs-server"]
    assert parsed.address == f"127.0.0.1:{gcs['containerPort']}"
    # Ray would let it drain for all of the time that it has.
    assert _drain_s(head) == 0
    for group in cluster["workerGroupSpecs"]:
        assert parsed.limit_s >= _drain_s(group["template"]["spec"])
    assert parsed.limit_s < head["terminationGracePeriodSeconds"]


def _drain_s(pod: Manifest) -> float:
    [container] = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    return float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])


def test_every_pod_has_its_own_probes(manifests: list[Manifest]) -> None:
    for container in _containers(manifests):
        declared = {one["name"] for one in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in declared
            assert container[probe]["failureThreshold"] > 1


def test_a_disruption_budget_covers_every_pod(manifests: list[Manifest]) -> None:
    budgets = [one["spec"] for one in manifests if one["kind"] == "PodDisruptionBudget"]
    for template in _templates(manifests):
        [budget] = [
            one
            for one in budgets
            if one["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ]
        # A RayCluster has no scale subresource, so its budgets must be absolute minima.
        assert budget["minAvailable"] == 1
        assert "maxUnavailable" not in budget


def test_the_object_store_leaves_half_of_the_shared_memory(ray_service: Manifest) -> None:
    for group in _groups(ray_service):
        volumes = {one["name"]: one for one in group["template"]["spec"]["volumes"]}
        room = parse_quantity(volumes["shared-mem"]["emptyDir"]["sizeLimit"])
        # Ray refuses less than 75 MiB.
        assert 75 * 2**20 <= int(group["rayStartParams"]["object-store-memory"]) <= room / 2


def test_full_log_files_of_all_processes_fit_their_volume(ray_service: Manifest) -> None:
    for group in _groups(ray_service):
        [container] = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        num_ranks = int(limits.get("nvidia.com/gpu", 1))
        env = {one["name"]: one["value"] for one in container["env"]}
        num_files = 1 + int(env["RAY_ROTATION_BACKUP_COUNT"])
        log_bytes = num_files * int(env["RAY_ROTATION_MAX_BYTES"])
        volumes = {one["name"]: one for one in group["template"]["spec"]["volumes"]}
        room = parse_quantity(volumes["ray-logs"]["emptyDir"]["sizeLimit"])
        # The ranks, their replica and a proxy; each has the log of its core worker, and Serve's.
        assert 2 * (num_ranks + 2) * log_bytes <= room
        assert room <= parse_quantity(limits["ephemeral-storage"])


def test_clients_reach_workers_only(ray_service: Manifest) -> None:
    assert ray_service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_only_the_autoscaler_gets_a_token() -> None:
    cluster = overlay("gpu-1")["RayService", "pagedray"]["spec"]["rayClusterConfig"]
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    [container] = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert path not in {one["mountPath"] for one in container["volumeMounts"]}
    autoscaler = {one["mountPath"]: one for one in cluster["autoscalerOptions"]["volumeMounts"]}
    [volume] = [
        one
        for one in cluster["headGroupSpec"]["template"]["spec"]["volumes"]
        if one["name"] == autoscaler[path]["name"]
    ]
    # The files that Ray's autoscaler reads, as in Kubernetes' own mount.
    files = [_file_names(source) for source in volume["projected"]["sources"]]
    assert files == [["token"], ["ca.crt"], ["namespace"]]
    assert cluster["autoscalerOptions"]["securityContext"]["readOnlyRootFilesystem"] is True


# Any: YAML.
def _file_names(source: dict[str, Any]) -> list[str]:
    [(kind, content)] = source.items()
    return (
        [content["path"]]
        if kind == "serviceAccountToken"
        else [one["path"] for one in content["items"]]
    )


@pytest.mark.parametrize("name", ["gpu-1", "tp-8", "tp-16", "two-hosts"])
def test_a_worker_has_the_resources_of_its_replicas(name: str) -> None:
    spec = overlay(name)["RayService", "pagedray"]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    num_ranks = application["args"].get("tensor_parallel_size", 1)
    num_gpus = int(limits["nvidia.com/gpu"])
    num_workers = -(-num_ranks // num_gpus)
    # A replica takes a core for itself, and its ranks.
    assert num_workers * num_gpus == num_ranks
    assert int(limits["cpu"]) >= num_gpus + 1
    assert (application["args"].get("placement_strategy") == "PACK") == (num_workers > 1)
    [deployment] = application["deployments"]
    if (scaling := deployment.get("autoscaling_config")) is None:
        num_least = num_most = deployment["num_replicas"]
    else:
        num_least, num_most = scaling["min_replicas"], scaling["max_replicas"]
    assert group["maxReplicas"] == num_most * num_workers
    assert group["minReplicas"] == num_least * num_workers


def _weight_bytes(model: str) -> int:
    """Return the size of a checkpoint in bfloat16."""
    folder, _, name = model.rpartition("/")
    assert folder == "/models"
    return _BYTES_PER_PARAMETER * _NUM_PARAMETERS[name]


@pytest.mark.parametrize("name", ["gpu-1", "tp-8", "two-hosts", "tp-16"])
def test_the_claim_holds_the_model_and_the_gpus_its_weights(name: str) -> None:
    manifests = overlay(name)
    spec = manifests["RayService", "pagedray"]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    weight_bytes = _weight_bytes(application["args"]["model"])
    assert _room(manifests["PersistentVolumeClaim", "pagedray-models"]) > 1.2 * weight_bytes
    num_ranks = application["args"].get("tensor_parallel_size", 1)
    # The rest is for the KV cache.
    assert weight_bytes / num_ranks < 0.7 * _GPU_BYTES


def test_the_claim_of_the_single_pod_holds_its_model() -> None:
    manifests = {one["kind"]: one for one in render(DEPLOY / "single-pod")}
    [container] = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    weight_bytes = _weight_bytes(container["args"][0])
    assert _room(manifests["PersistentVolumeClaim"]) > 1.2 * weight_bytes


@pytest.mark.parametrize("name", ["gpu-1", "tp-16"])
def test_the_documented_selector_creates_the_claim_alone(name: str) -> None:
    key, value = "app.kubernetes.io/component", "models"
    assert f"-l {key}={value}" in (DEPLOY.parent / "docs/kubernetes.md").read_text()
    labeled = [
        one["kind"]
        for one in overlay(name).values()
        if one["metadata"].get("labels", {}).get(key) == value
    ]
    assert labeled == ["PersistentVolumeClaim"]


def _room(claim: Manifest) -> int:
    return parse_quantity(claim["spec"]["resources"]["requests"]["storage"])
