"""The volumes for models hold the models that the manifests serve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tests.deploy.kustomize import DEPLOY, overlay, render
from tests.deploy.quantity import parse_quantity

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

_NUM_PARAMETERS = {
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.1-405B-Instruct": 405_853_388_800,
}
_BYTES_PER_PARAMETER = 2
_GPU_BYTES = 80 * 10**9


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
