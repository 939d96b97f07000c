"""All pods, also the one that fills the volume, meet the pod security standard `restricted`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, overlay, set_at
from tests.deploy.network.policies import Peer, admits
from tests.deploy.rules.pod_security import restricted_violations
from tests.deploy.rules.schemas import check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.kustomize import Manifest

_FILLER = DEPLOY / "kuberay/components/models/filler.yaml"


def _pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    for manifest in manifests:
        match manifest["kind"]:
            case "Pod":
                yield manifest["spec"]
            case "Deployment":
                yield manifest["spec"]["template"]["spec"]
            case "RayService":
                cluster = manifest["spec"]["rayClusterConfig"]
                for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
                    yield group["template"]["spec"]


@pytest.fixture(scope="module")
def filler() -> list[Manifest]:
    """The manifests that the documentation applies to fill the volume."""
    return list(yaml.safe_load_all(_FILLER.read_text()))


def test_the_standard_admits_all_pods(manifests: list[Manifest]) -> None:
    for pod in _pods(manifests):
        assert restricted_violations(pod) == []


def test_the_standard_admits_the_pods_with_each_component(extended: list[Manifest]) -> None:
    for pod in _pods(extended):
        assert restricted_violations(pod) == []


def test_the_standard_admits_the_autoscaler() -> None:
    cluster = overlay("gpu-1")["RayService", "pagedray"]["spec"]["rayClusterConfig"]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    autoscaler = {
        "name": "autoscaler",
        "securityContext": cluster["autoscalerOptions"]["securityContext"],
    }
    assert restricted_violations({**pod, "containers": [autoscaler]}) == []


def test_the_standard_admits_the_filler(filler: list[Manifest]) -> None:
    for manifest in filler:
        check(manifest)
    [pod] = _pods(filler)
    assert restricted_violations(pod) == []
    claim = overlay("gpu-1")["PersistentVolumeClaim", "pagedray-models"]
    [volume] = pod["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    # The servers, which have the same group, can read the files.
    [server, _] = _pods(list(overlay("gpu-1").values()))
    assert pod["securityContext"]["fsGroup"] == server["securityContext"]["fsGroup"]


def test_the_documented_filler_is_the_tested_one() -> None:
    text = (DEPLOY.parent / "docs/kubernetes.md").read_text()
    assert f"-f {_FILLER.relative_to(DEPLOY.parent)}" in text
    assert not re.search(r"kubectl .*\brun\b", text)


def test_the_filler_has_no_network(filler: list[Manifest]) -> None:
    [pod] = [one for one in filler if one["kind"] == "Pod"]
    peer = Peer(labels=pod["metadata"]["labels"], namespace={"kubernetes.io/metadata.name": "llm"})
    for other in (Peer.outside("93.184.216.34"), Peer.pod(app="pagedray", component="head")):
        assert not admits(filler, peer, other, 443)
        assert not admits(filler, other, peer, 443)


@pytest.mark.parametrize(
    ("path", "value", "violation"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("volumes/0", {"name": "models", "hostPath": {"path": "/models"}}, "volume models"),
        ("securityContext/runAsNonRoot", False, "filler: runAsNonRoot"),
        ("securityContext/runAsUser", 0, "filler: runAsUser"),
        ("securityContext/seccompProfile", {}, "filler: seccompProfile"),
        ("containers/0/securityContext", {}, "filler: allowPrivilegeEscalation"),
        (
            "containers/0/securityContext/capabilities/add",
            ["IPC_LOCK"],
            "filler: capabilities.add",
        ),
    ],
)
def test_violations_are_found(path: str, value: object, violation: str) -> None:
    [pod] = _pods(list(yaml.safe_load_all(_FILLER.read_text())))
    set_at(pod, path, value)
    assert violation in restricted_violations(pod)
