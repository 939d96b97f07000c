"""Which connections to and from the pods the policies allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.deploy.kustomize import DEPLOY, Manifest, overlay, render
from tests.deploy.network.policies import Peer, admits

HEAD = Peer.pod(app="pagedray", component="head")
WORKER = Peer.pod(app="pagedray", component="worker")
SERVER = Peer.pod(app="pagedray", component="server")
STRANGER = Peer.pod(app="stranger")
FAR_STRANGER = Peer.pod("elsewhere", app="pagedray", component="head")
CLIENT = Peer.pod(app="web", pagedray_client="true")
FAR_CLIENT = replace(
    Peer.pod("web"),
    namespace={"kubernetes.io/metadata.name": "web", "pagedray-client": "true"},
)
OPERATOR = Peer.pod("kuberay-system", app="kuberay-operator")
FAKE_OPERATOR = Peer.pod("web", app="kuberay-operator")
PROMETHEUS = Peer.pod("monitoring", app="prometheus")
DNS = replace(Peer.pod("kube-system"), labels={"k8s-app": "kube-dns"})
NODE_LOCAL_DNS = Peer.outside("169.254.20.10")
NODE_LOCAL_DNS_POD = replace(DNS, labels={"k8s-app": "node-local-dns"})
METADATA_SERVER = Peer.outside("169.254.169.254")
INTERNET = Peer.outside("93.184.216.34")

GCS, DASHBOARD, AGENT, METRICS, HTTP, GRPC, CHANNEL = 6379, 8265, 52365, 8080, 8000, 9000, 40123
EVERY_PORT = {GCS, DASHBOARD, AGENT, METRICS, HTTP, GRPC, CHANNEL}


@pytest.fixture(params=["cpu-demo", "gpu-1", "tp-8", "tp-16", "two-hosts"])
def policies(request: pytest.FixtureRequest) -> list[Manifest]:
    """The manifests of each overlay."""
    return list(overlay(request.param).values())


def test_every_declared_port_is_tried(policies: list[Manifest]) -> None:
    [service] = [one for one in policies if one["kind"] == "RayService"]
    cluster = service["spec"]["rayClusterConfig"]
    pods = [
        group["template"]["spec"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    ]
    containers = [container for pod in pods for container in pod["containers"]]
    declared = {port["containerPort"] for one in containers for port in one["ports"]}
    assert declared <= EVERY_PORT


@pytest.mark.parametrize("target", [HEAD, WORKER], ids=["head", "worker"])
def test_ports_are_open_to_their_clients_only(policies: list[Manifest], target: Peer) -> None:
    def open_to(source: Peer) -> set[int]:
        return {port for port in EVERY_PORT if admits(policies, source, target, port)}

    assert open_to(HEAD) == open_to(WORKER) == EVERY_PORT
    assert open_to(CLIENT) == open_to(FAR_CLIENT) == {HTTP, GRPC}
    assert open_to(OPERATOR) == ({HTTP, DASHBOARD} if target is HEAD else set())
    for source in (STRANGER, FAR_STRANGER, FAKE_OPERATOR, PROMETHEUS, INTERNET):
        assert not open_to(source)


@pytest.mark.parametrize("source", [HEAD, WORKER], ids=["head", "worker"])
def test_pods_reach_each_other_and_dns_only(policies: list[Manifest], source: Peer) -> None:
    for server in (DNS, NODE_LOCAL_DNS, NODE_LOCAL_DNS_POD):
        assert admits(policies, source, server, 53, "UDP")
        assert admits(policies, source, server, 53, "TCP")
        assert not admits(policies, source, server, 80)
    for target in (STRANGER, FAR_STRANGER, METADATA_SERVER, INTERNET):
        assert not any(admits(policies, source, target, port) for port in (53, 80, HTTP, GCS))


def test_the_head_reaches_the_api_server_if_it_has_an_autoscaler() -> None:
    api_server = Peer.outside("10.0.0.1")
    with_autoscaler = list(overlay("gpu-1").values())
    without = list(overlay("tp-8").values())
    assert admits(with_autoscaler, HEAD, api_server, 443)
    assert not admits(with_autoscaler, WORKER, api_server, 443)
    assert not admits(without, HEAD, api_server, 443)


@pytest.mark.parametrize(
    ("rule", "is_open"),
    [
        ({}, True),
        ({"from": [], "ports": []}, True),
        ({"ports": [{"port": HTTP}]}, True),
        ({"ports": [{"port": GRPC}]}, False),
        ({"ports": [{"protocol": "UDP", "port": HTTP}]}, False),
        ({"from": [{"podSelector": {}}]}, True),
        ({"from": [{"podSelector": {"matchLabels": {"app": "other"}}}]}, False),
        ({"from": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]}, False),
    ],
)
def test_a_rule_admits_as_kubernetes_documents(rule: Manifest, is_open: bool) -> None:
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]}
    policy = {"kind": "NetworkPolicy", "metadata": {"name": "one"}, "spec": spec}
    assert admits([policy], STRANGER, WORKER, HTTP) is is_open


@pytest.mark.parametrize(
    "rule",
    [
        {"ports": [{"port": HTTP, "endPort": GRPC}]},
        {"ports": [{"port": "serve"}]},
        {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
        {"from": [{"podSelector": {"matchExpressions": []}}]},
    ],
)
def test_what_is_not_evaluated_is_rejected(rule: Manifest) -> None:
    spec = {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [rule]}
    policy = {"kind": "NetworkPolicy", "metadata": {"name": "one"}, "spec": spec}
    with pytest.raises(AssertionError):
        admits([policy], STRANGER, WORKER, HTTP)


def test_prometheus_reaches_metrics_with_monitoring(monitored: list[Manifest]) -> None:
    assert admits(monitored, PROMETHEUS, WORKER, METRICS)
    assert not admits(monitored, PROMETHEUS, WORKER, CHANNEL)


def test_a_single_pod_is_open_to_clients_only() -> None:
    policies = render(DEPLOY / "single-pod")
    for source in (CLIENT, FAR_CLIENT):
        assert admits(policies, source, SERVER, HTTP)
        assert admits(policies, source, SERVER, GRPC)
        assert not admits(policies, source, SERVER, METRICS)
    assert not admits(policies, STRANGER, SERVER, HTTP)
    for target in (STRANGER, INTERNET, DNS):
        assert not admits(policies, SERVER, target, 53, "UDP")
