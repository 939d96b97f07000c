"""Evaluates NetworkPolicies by the rules that Kubernetes documents, and rejects other fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

__all__ = ["OUR_NAMESPACE", "Peer", "admits"]

OUR_NAMESPACE = "llm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A pod by its labels and those of its namespace, or an address outside the cluster."""

    labels: Mapping[str, str]
    namespace: Mapping[str, str]
    address: str | None = None

    @classmethod
    def pod(cls, namespace: str = OUR_NAMESPACE, **labels: str) -> Peer:
        """Return a pod; `app` stands for the full name of that label."""
        long = {"app": "app.kubernetes.io/name", "component": "app.kubernetes.io/component"}
        return cls(
            labels={
                long.get(name, name.replace("_", "-")): value for name, value in labels.items()
            },
            namespace={"kubernetes.io/metadata.name": namespace},
        )

    @classmethod
    def outside(cls, address: str) -> Peer:
        """Return an address outside the cluster."""
        return cls(labels={}, namespace={}, address=address)


def admits(
    manifests: Sequence[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Return whether the policies of the source and of the target allow a connection."""
    return _side(manifests, "Egress", source, target, port, protocol) and _side(
        manifests, "Ingress", target, source, port, protocol
    )


def _side(
    manifests: Sequence[Manifest], kind: str, pod: Peer, other: Peer, port: int, protocol: str
) -> bool:
    for one in manifests:
        if one["kind"] == "NetworkPolicy":
            _know(one["spec"], "podSelector", "policyTypes", "ingress", "egress")
    policies = [
        one["spec"]
        for one in manifests
        if one["kind"] == "NetworkPolicy"
        and kind in one["spec"]["policyTypes"]
        and pod.address is None
        and pod.namespace["kubernetes.io/metadata.name"] == OUR_NAMESPACE
        and _matches(one["spec"]["podSelector"], pod.labels)
    ]
    # A pod that no policy selects accepts all traffic.
    if not policies:
        return True
    direction = {"Ingress": "from", "Egress": "to"}[kind]
    for policy in policies:
        for rule in policy.get(kind.lower(), []):
            _know(rule, "ports", direction)
    return any(
        _names(rule.get("ports"), port, protocol) and _reaches(rule.get(direction), other)
        for policy in policies
        for rule in policy.get(kind.lower(), [])
    )


def _names(ports: Sequence[Manifest] | None, port: int, protocol: str) -> bool:
    return not ports or any(_is_port(one, port, protocol) for one in ports)


def _is_port(named: Manifest, port: int, protocol: str) -> bool:
    _know(named, "protocol", "port")
    assert isinstance(named["port"], int), "a port by its name depends on the pod"
    return named.get("protocol", "TCP") == protocol and bool(named["port"] == port)


def _reaches(peers: Sequence[Manifest] | None, other: Peer) -> bool:
    # An empty list is as none.
    return not peers or any(_is_peer(one, other) for one in peers)


def _is_peer(peer: Manifest, other: Peer) -> bool:
    _know(peer, "ipBlock", "namespaceSelector", "podSelector")
    if "ipBlock" in peer:
        _know(peer, "ipBlock")
        _know(peer["ipBlock"], "cidr")
        inside = ip_network(peer["ipBlock"]["cidr"])
        return other.address is not None and ip_address(other.address) in inside
    if other.address is not None:
        return False
    if "namespaceSelector" in peer:
        is_near = _matches(peer["namespaceSelector"], other.namespace)
    else:
        is_near = other.namespace["kubernetes.io/metadata.name"] == OUR_NAMESPACE
    return is_near and _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    _know(selector, "matchLabels")
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _know(part: Manifest, *fields: str) -> None:
    unknown = set(part) - set(fields)
    assert not unknown, f"{sorted(unknown)} is not evaluated"
