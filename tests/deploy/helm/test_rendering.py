"""The Helm chart renders what the Kustomize folders say, and valid manifests for the rest."""

from __future__ import annotations

import hashlib
import tomllib
from typing import TYPE_CHECKING, Any, cast

import pytest
import yaml
from ray.serve.config import AutoscalingConfig

from cluster.serving.ray_serve.deployment import deployment_options
from cluster.serving.ray_serve.options import read_arguments
from tests.deploy.helm.chart import VALUES, needs_helm, render_chart, run_helm
from tests.deploy.kustomize import DEPLOY, overlay, render, seconds_of, write_overlay
from tests.deploy.network.policies import Peer, admits
from tests.deploy.rules.operator_rules import operator_errors
from tests.deploy.rules.pod_security import restricted_violations
from tests.deploy.rules.schemas import check

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

pytestmark = needs_helm
_HUB = {"model": "Qwen/Qwen3-8B"}
_COMPONENTS: dict[str, Manifest] = {
    "gpu-node": {
        "worker": {
            "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            "runtimeClassName": "nvidia",
        }
    },
    "redis": {"gcs": {"faultTolerance": "redis"}},
    "rocksdb": {"gcs": {"faultTolerance": "rocksdb", "rocksdb": {"featureGateEnabled": True}}},
    "tracing": {"tracing": {"enabled": True}},
    "upgrade-in-place": {"upgrade": {"strategy": "None"}},
    "rdma": {"worker": {"rdmaResource": "rdma/rdma_shared_device_a"}},
    **{name: {"gangScheduler": {"name": name}} for name in ("kueue", "volcano", "kai-scheduler")},
}
_MAX_LABEL = 63
"""Of labels, Services and Jobs, which are a label of their pods."""
_NODES: Manifest = {
    "nodeSelector": {"pool": "small"},
    "tolerations": [{"key": "small", "operator": "Exists", "effect": "NoSchedule"}],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_the_chart_renders_the_same_as_the_folder(name: str) -> None:
    assert _by_name(render_chart(name)) == _by_name(list(overlay(name).values()))


@pytest.mark.parametrize("component", sorted(_COMPONENTS))
def test_the_chart_renders_the_same_as_a_component(component: str, tmp_path: Path) -> None:
    kuberay = DEPLOY / "kuberay"
    folder = write_overlay(tmp_path, kuberay / "overlays/tp-16", kuberay / "components" / component)
    expected = _by_name(render(folder))
    assert _by_name(render_chart("tp-16", _COMPONENTS[component])) == expected
    assert expected != _by_name(list(overlay("tp-16").values()))


def test_every_overlay_and_component_is_compared() -> None:
    kuberay = DEPLOY / "kuberay"
    overlays = {path.name for path in (kuberay / "overlays").iterdir()}
    assert overlays == {path.stem for path in VALUES.glob("*.yaml")}
    # Those three are in overlays, or compared below.
    others = {"autoscaling", "models", "monitoring"}
    components = {path.name for path in (kuberay / "components").iterdir()}
    assert components == set(_COMPONENTS) | others


def test_the_chart_monitors_as_the_component(tmp_path: Path) -> None:
    kuberay = DEPLOY / "kuberay"
    folder = write_overlay(tmp_path, kuberay / "overlays/tp-8", kuberay / "components/monitoring")
    expected = _by_name(render(folder))
    # The rules and the dashboard are the same for all releases.
    shared = {kind for kind, _ in expected} & {"PrometheusRule", "ConfigMap"}
    rendered = _by_name(render_chart("tp-8", {"monitoring": {"enabled": True}}))
    assert len(shared) == 2
    assert rendered == {key: one for key, one in expected.items() if key[0] not in shared}


def test_arguments_may_be_lists_and_large_numbers() -> None:
    arguments = {"served_model_name": ["one", "two"], "max_model_len": 1_000_000, "lease_s": 7.5}
    [serve] = [
        yaml.safe_load(one["spec"]["serveConfigV2"])
        for one in render_chart(None, _HUB | {"arguments": arguments})
        if one["kind"] == "RayService"
    ]
    assert arguments.items() <= serve["applications"][0]["args"].items()


def test_the_number_of_replicas_is_no_argument() -> None:
    # Serve replaces all replicas when args change.
    application = _application({"replicas": 3})
    assert "num_replicas" not in application["args"]
    assert application["deployments"] == [{"name": "PagedRay", "num_replicas": 3}]


@pytest.mark.parametrize("targets", [{}, {"target_kv_use": 0.5, "target_tokens": 1_000_000}])
def test_scaled_replicas_follow_the_policy_of_the_arguments(targets: Manifest) -> None:
    application = _application({"replicas": 3, "maxReplicas": 5, "arguments": targets})
    [deployment] = application["deployments"]
    arguments = application["args"] | {"num_replicas": 3, "max_replicas": 5}
    expected = deployment_options(read_arguments(arguments))["autoscaling_config"]
    assert AutoscalingConfig(**deployment["autoscaling_config"]) == expected
    assert not application["args"].keys() & {"num_replicas", "max_replicas"}


def test_one_value_is_enough() -> None:
    manifests = render_chart(None, _HUB)
    kinds = [one["kind"] for one in manifests]
    assert {"RayService", "PersistentVolumeClaim", "Job"} < set(kinds)
    assert kinds.count("Secret") == 2
    for manifest in manifests:
        check(manifest)
    assert operator_errors(_service(manifests)) == []


def test_all_pods_of_a_downloaded_model_meet_the_restricted_standard() -> None:
    manifests = render_chart(None, _HUB)
    cluster = _service(manifests)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    for pod in (*pods, _job_pod(manifests)):
        assert restricted_violations(pod) == []
    # Replicas wait for the last file, in a volume that they only read.
    for pod in pods:
        [init] = pod["initContainers"]
        assert init["command"][-2:] == ["--wait", "Qwen/Qwen3-8B"]
        [mount] = [one for one in init["volumeMounts"] if one["name"] == "models"]
        assert mount["readOnly"]
        assert _environment(pod["containers"][0])["HF_HUB_OFFLINE"] == "1"


def test_the_download_writes_where_replicas_read_and_has_its_token_from_a_secret() -> None:
    manifests = render_chart(None, _HUB | {"download": {"tokenSecret": "hub"}})
    [container] = _job_pod(manifests)["containers"]
    [token] = [one for one in container["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    [worker] = _service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    [replica] = worker["template"]["spec"]["containers"]
    home = _environment(replica)["HF_HOME"]
    assert _environment(container)["HF_HOME"] == home
    assert home.startswith("/models/")


def test_the_download_alone_reaches_the_hub() -> None:
    manifests = render_chart(None, _HUB)
    job, hub = Peer.pod(app="pagedray-download"), Peer.outside("93.184.216.34")
    worker = Peer.pod(app="pagedray", component="worker")
    assert admits(manifests, job, hub, 443)
    assert not admits(manifests, job, hub, 80)
    assert not admits(manifests, job, worker, 8000)
    assert not admits(manifests, worker, hub, 443)


def test_a_model_of_s3_is_downloaded_into_the_folder_that_replicas_load() -> None:
    s3 = {"secret": "aws", "region": "eu-central-1", "endpoint": "https://minio.example.com:9000"}
    manifests = render_chart(None, {"model": "s3://models/team/tiny", "download": {"s3": s3}})
    for manifest in manifests:
        check(manifest)
    folder = "/models/s3/models/team/tiny"
    arguments = ["--folder", folder, "s3://models/team/tiny"]
    pod = _job_pod(manifests)
    assert restricted_violations(pod) == []
    [container] = pod["containers"]
    assert container["command"] == ["pagedray", "deploy", "fetch", *arguments]
    assert _environment(container)["AWS_ENDPOINT_URL"] == s3["endpoint"]
    secrets = {one["name"] for one in container["env"] if "valueFrom" in one}
    assert secrets == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    spec = _service(manifests)["spec"]
    serve = yaml.safe_load(spec["serveConfigV2"])
    assert serve["applications"][0]["args"]["model"] == folder
    cluster = spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [init] = group["template"]["spec"]["initContainers"]
        assert init["command"] == ["pagedray", "deploy", "fetch", "--wait", *arguments]
    store = Peer.outside("93.184.216.34")
    assert admits(manifests, Peer.pod(app="pagedray-download"), store, 9000)
    assert not admits(manifests, Peer.pod(app="pagedray", component="worker"), store, 9000)


def test_an_image_of_the_model_replaces_the_claim() -> None:
    changes = {"model": "/models", "storage": {"image": "ghcr.io/team/qwen3-8b:1"}}
    manifests = render_chart(None, changes)
    for manifest in manifests:
        check(manifest)
    assert not {"Job", "PersistentVolumeClaim"} & {one["kind"] for one in manifests}
    cluster = _service(manifests)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [volume] = [one for one in pod["volumes"] if one["name"] == "models"]
        assert volume["image"]["reference"] == "ghcr.io/team/qwen3-8b:1"
        # The standard lists the types of volumes that it allows, and this is not one.
        assert restricted_violations(pod) == ["volume models"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "s3://models/tiny", "/models/tiny"])
def test_all_pods_see_the_same_folder_of_an_existing_claim(model: str) -> None:
    storage = {"existingClaim": "shared", "subPath": "team/llm"}
    manifests = render_chart(None, {"model": model, "storage": storage})
    for manifest in manifests:
        check(manifest)
    assert "PersistentVolumeClaim" not in {one["kind"] for one in manifests}
    cluster = _service(manifests)["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    jobs = [_job_pod(manifests)] if not model.startswith("/") else []
    for pod in (*pods, *jobs):
        [volume] = [one for one in pod["volumes"] if one["name"] == "models"]
        assert volume["persistentVolumeClaim"]["claimName"] == "shared"
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            [mount] = [one for one in container["volumeMounts"] if one["name"] == "models"]
            assert (mount["mountPath"], mount["subPath"]) == ("/models", "team/llm")
            # The Job alone writes, and makes the folder.
            assert mount.get("readOnly", False) == (pod not in jobs)


def test_a_new_claim_has_its_class_and_access_mode() -> None:
    storage = {"storageClassName": "fast", "accessMode": "ReadWriteOnce", "size": "3Ti"}
    manifests = render_chart(None, _HUB | {"storage": storage})
    [claim] = [one for one in manifests if one["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "3Ti"}},
    }


def test_another_folder_is_another_job() -> None:
    changes = _HUB | {"storage": {"subPath": "other"}}
    first, other = (_job(render_chart(None, one))["metadata"]["name"] for one in (_HUB, changes))
    assert first != other


def test_another_model_is_another_job() -> None:
    first = _job(render_chart(None, _HUB))["metadata"]["name"]
    assert _job(render_chart(None, _HUB))["metadata"]["name"] == first
    other = render_chart(None, {"model": "Qwen/Qwen3-4B"})
    assert _job(other)["metadata"]["name"] != first


def test_the_key_of_a_new_release_is_the_one_that_its_digest_is_of() -> None:
    secrets = {
        one["metadata"]["name"]: one["stringData"]
        for one in render_chart(None, _HUB)
        if one["kind"] == "Secret"
    }
    [tenant] = tomllib.loads(secrets["pagedray-api-keys"]["keys.toml"])["tenants"].values()
    key = secrets["pagedray-client-key"]["key"]
    assert tenant["keys"] == [f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"]
    assert len(key) > 40


def test_what_the_head_mounts_outlives_the_release() -> None:
    # KubeRay's Job for Redis has the volumes of the head, and runs when all else is deleted.
    manifests = render_chart(None, _HUB | {"gcs": {"faultTolerance": "redis"}})
    kept = {
        one["metadata"]["name"]
        for one in manifests
        if one["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    head = _service(manifests)["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    volumes = head["volumes"]
    mounted = {one["secret"]["secretName"] for one in volumes if "secret" in one}
    mounted |= {
        one["persistentVolumeClaim"]["claimName"]
        for one in volumes
        if "persistentVolumeClaim" in one
    }
    assert mounted == {"pagedray-api-keys", "pagedray-models"}
    # A key without its digest would be of no use.
    assert kept == mounted | {"pagedray-client-key"}


def test_routes_and_rocksdb_match_their_schemas() -> None:
    changes = {
        "gateway": {"enabled": True, "name": "gateway", "hostnames": ["llm.example.com"]},
        "gcs": {"faultTolerance": "rocksdb", "rocksdb": {"featureGateEnabled": True}},
    }
    manifests = render_chart("gpu-1", changes)
    for manifest in manifests:
        check(manifest)
    ports = {
        one["kind"]: one["spec"]["rules"][0]["backendRefs"][0]["port"]
        for one in manifests
        if one["kind"].endswith("Route")
    }
    assert ports == {"HTTPRoute": 8000, "GRPCRoute": 9000}
    [http] = [one for one in manifests if one["kind"] == "HTTPRoute"]
    # The timeout is for the whole response, and streams may take more than ten minutes.
    assert seconds_of(http["spec"]["rules"][0]["timeouts"]["request"]) >= 3600
    assert operator_errors(_service(manifests)) == []


def test_the_endpoint_picker_reads_the_metrics_of_workers_alone() -> None:
    gateway = {"enabled": True, "name": "gateway", "inferencePool": {"enabled": True}}
    manifests = render_chart("gpu-1", {"gateway": gateway})
    for manifest in manifests:
        check(manifest)
    [pool] = [one for one in manifests if one["kind"] == "InferencePool"]
    [route] = [one for one in manifests if one["kind"] == "HTTPRoute"]
    assert route["spec"]["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "pagedray"}
    ]
    [worker] = _service(manifests)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = worker["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    picker = Peer.pod(inferencepool="pagedray-epp")
    assert admits(manifests, picker, Peer.pod(app="pagedray", component="worker"), 8080)
    assert not admits(manifests, picker, Peer.pod(app="pagedray", component="head"), 8080)
    assert not admits(manifests, picker, Peer.pod(app="pagedray", component="worker"), 8265)


def _by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(one["kind"], one["metadata"]["name"]): _comparable(one) for one in manifests}


def _comparable(manifest: Manifest) -> Manifest:
    """Return a manifest without what is for Helm, and with the Serve configuration parsed."""
    metadata = {name: one for name, one in manifest["metadata"].items() if name != "annotations"}
    spec: Any = manifest.get("spec", {})
    if "serveConfigV2" in spec:
        spec = spec | {"serveConfigV2": yaml.safe_load(spec["serveConfigV2"])}
    return manifest | {"metadata": metadata, "spec": spec}


def _service(manifests: list[Manifest]) -> Manifest:
    [service] = [one for one in manifests if one["kind"] == "RayService"]
    return service


# Any: YAML.
def _application(values: Manifest) -> dict[str, Any]:
    service = _service(render_chart(None, _HUB | values))
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return cast("dict[str, Any]", application)


def _job(manifests: list[Manifest]) -> Manifest:
    [job] = [one for one in manifests if one["kind"] == "Job"]
    return job


def _job_pod(manifests: list[Manifest]) -> Manifest:
    pod: Manifest = _job(manifests)["spec"]["template"]["spec"]
    return pod


def _environment(container: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container["env"]}


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
