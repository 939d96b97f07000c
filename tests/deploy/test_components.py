"""What the optional components add to a user's overlay."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.serving.ray_serve.options import read_arguments
from tests.deploy.kustomize import DEPLOY, Manifest, render, write_overlay
from tests.deploy.network.policies import Peer, admits
from tests.deploy.rules.operator_rules import operator_errors
from tests.deploy.rules.schemas import check
from tests.deploy.serve_demo import MIDDLEWARES, environment_of

if TYPE_CHECKING:
    from pathlib import Path

HEAD = Peer.pod(app="pagedray", component="head")
WORKER = Peer.pod(app="pagedray", component="worker")
SERVER = Peer.pod(app="pagedray", component="server")
PROMETHEUS = Peer.pod("monitoring", app="prometheus")
COLLECTOR = Peer.pod("observability", app="opentelemetry-collector")
REDIS = Peer.pod("redis", app="redis")
HTTP, GRPC, OTLP, REDIS_PORT = 8000, 9000, 4318, 6379


def _with(folder: Path, name: str, *components: str) -> list[Manifest]:
    kuberay = DEPLOY / "kuberay"
    write_overlay(
        folder, kuberay / "overlays" / name, *(kuberay / "components" / one for one in components)
    )
    return render(folder)


def _single_pod_with(folder: Path, component: str) -> list[Manifest]:
    base = DEPLOY / "single-pod"
    return render(write_overlay(folder, base, base / "components" / component))


def _only(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [one for one in manifests if one["kind"] == kind]
    return found


def _worker(manifests: list[Manifest]) -> Manifest:
    cluster = _only(manifests, "RayService")["spec"]["rayClusterConfig"]
    pod: Manifest = cluster["workerGroupSpecs"][0]["template"]["spec"]
    return pod


def test_components_match_their_schemas_and_the_rules_of_the_operator(
    extended: list[Manifest],
) -> None:
    for manifest in extended:
        check(manifest)
        if manifest["kind"] == "RayService":
            assert operator_errors(manifest) == []


def test_redis_keeps_the_state_of_each_ray_cluster_apart(tmp_path: Path) -> None:
    manifests = _with(tmp_path, "two-hosts", "redis")
    cluster = _only(manifests, "RayService")["spec"]["rayClusterConfig"]
    options = cluster["gcsFaultToleranceOptions"]
    # The clusters of an upgrade would share a namespace that is set here.
    assert set(options) == {"redisAddress", "redisPassword"}
    assert set(options["redisPassword"]["valueFrom"]) == {"secretKeyRef"}
    assert options["redisAddress"].endswith(f".redis:{REDIS_PORT}")
    assert admits(manifests, HEAD, REDIS, REDIS_PORT)
    assert not admits(manifests, WORKER, REDIS, REDIS_PORT)
    assert not admits(manifests, HEAD, Peer.pod("web", app="redis"), REDIS_PORT)
    assert not admits(_with(tmp_path, "two-hosts"), HEAD, REDIS, REDIS_PORT)


def test_rocksdb_keeps_the_state_of_each_ray_cluster_in_a_claim_of_its_own(tmp_path: Path) -> None:
    manifests = _with(tmp_path, "two-hosts", "rocksdb")
    options = _only(manifests, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["backend"] == "rocksdb"
    # The clusters of an upgrade would share a claim that is named here.
    assert "claimName" not in options["storage"]
    # Two heads cannot write one database.
    assert options["storage"]["accessModes"] == ["ReadWriteOnce"]


def test_a_password_in_plain_text_breaks_a_rule_of_the_operator(tmp_path: Path) -> None:
    service = _only(_with(tmp_path, "tp-8", "redis"), "RayService")
    [head] = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    head["env"].append({"name": "REDIS_PASSWORD", "value": "secret"})
    assert operator_errors(service) != []


def test_spans_of_workers_reach_the_collector(tmp_path: Path) -> None:
    manifests = _with(tmp_path, "two-hosts", "tracing")
    [container] = _worker(manifests)["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(f".observability:{OTLP}")
    assert admits(manifests, WORKER, COLLECTOR, OTLP)
    assert not admits(manifests, WORKER, COLLECTOR, HTTP)
    assert not admits(manifests, HEAD, COLLECTOR, OTLP)
    assert not admits(_with(tmp_path, "two-hosts"), WORKER, COLLECTOR, OTLP)


def test_spans_of_a_single_pod_reach_the_collector(tmp_path: Path) -> None:
    manifests = _single_pod_with(tmp_path, "tracing")
    [container] = _only(manifests, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1].startswith("--otlp-endpoint=http://")
    assert admits(manifests, SERVER, COLLECTOR, OTLP)
    for address in ("169.254.20.10", "93.184.216.34"):
        is_dns = address == "169.254.20.10"
        assert admits(manifests, SERVER, Peer.outside(address), 53, "UDP") is is_dns


def test_prometheus_scrapes_a_single_pod_with_the_key_of_an_admin(tmp_path: Path) -> None:
    manifests = _single_pod_with(tmp_path, "monitoring")
    monitor = _only(manifests, "PodMonitor")["spec"]
    [endpoint] = monitor["podMetricsEndpoints"]
    template = _only(manifests, "Deployment")["spec"]["template"]
    assert monitor["selector"]["matchLabels"] == template["metadata"]["labels"]
    [container] = template["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["type"] == "Bearer"
    assert set(endpoint["authorization"]["credentials"]) == {"name", "key"}
    assert admits(manifests, PROMETHEUS, SERVER, ports[endpoint["port"]])
    assert not admits(manifests, PROMETHEUS, SERVER, GRPC)
    rules = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    assert _only(manifests, "PrometheusRule")["spec"] == rules


@pytest.mark.parametrize(
    ("component", "label"),
    [
        ("kueue", "kueue.x-k8s.io/queue-name"),
        ("volcano", "volcano.sh/queue-name"),
        ("kai-scheduler", "kai.scheduler/queue"),
    ],
)
def test_a_gang_scheduler_gets_its_queue(tmp_path: Path, component: str, label: str) -> None:
    service = _only(_with(tmp_path, "tp-16", component), "RayService")
    assert service["metadata"]["labels"][label] == "pagedray"
    # KubeRay copies the labels of the service to its clusters; the others are still there.
    assert service["metadata"]["labels"]["app.kubernetes.io/name"] == "pagedray"


def test_workers_get_rdma_devices_without_capabilities(tmp_path: Path) -> None:
    [container] = _worker(_with(tmp_path, "tp-16", "rdma"))["containers"]
    resources = container["resources"]
    device = {name for name in resources["limits"] if name.startswith("rdma/")}
    assert len(device) == 1
    # Kubernetes requires equal numbers of an extended resource.
    assert {name: resources["requests"][name] for name in device} == {
        name: resources["limits"][name] for name in device
    }
    assert resources["limits"]["nvidia.com/gpu"] == "8"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_workers_alone_select_the_model_of_gpu(tmp_path: Path) -> None:
    manifests = _with(tmp_path, "tp-8", "gpu-node")
    worker = _worker(manifests)
    assert set(worker["nodeSelector"]) == {"nvidia.com/gpu.product"}
    assert worker["runtimeClassName"] == "nvidia"
    cluster = _only(manifests, "RayService")["spec"]["rayClusterConfig"]
    assert not {"nodeSelector", "runtimeClassName"} & set(
        cluster["headGroupSpec"]["template"]["spec"]
    )


def test_an_upgrade_in_place_starts_no_second_cluster(tmp_path: Path) -> None:
    service = _only(_with(tmp_path, "tp-16", "upgrade-in-place"), "RayService")
    assert service["spec"]["upgradeStrategy"] == {"type": "None"}


def test_components_combine(tmp_path: Path) -> None:
    names = ["redis", "tracing", "monitoring", "rdma", "gpu-node", "volcano", "upgrade-in-place"]
    for manifest in _with(tmp_path, "tp-16", *names):
        check(manifest)


def test_ray_serve_and_the_application_accept_the_configuration(ray_service: Manifest) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "pagedray:build_app"
    arguments = read_arguments(application.args)
    # The mount path of the Secret.
    assert arguments.serve.api_keys == "/etc/pagedray/keys.toml"


def test_the_callbacks_of_the_proxies_exist(ray_service: Manifest) -> None:
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))
    cluster = ray_service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        module, _, name = environment_of(container)[MIDDLEWARES].partition(":")
        assert callable(getattr(import_module(module), name))
