"""The chart gives each worker a disk for prefixes, and its replicas no more than that disk has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from cluster.engine.engine_options import check_options
from cluster.serving.ray_serve.options import read_arguments
from tests.deploy.helm.chart import needs_helm, render_chart, run_helm
from tests.deploy.kustomize import parse_quantity
from tests.deploy.rules.operator_rules import operator_errors
from tests.deploy.rules.pod_security import restricted_violations
from tests.deploy.rules.schemas import check

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

pytestmark = needs_helm

_FOLDER = "/var/cache/pagedray"
_SIZE = 400 * 2**30
_DISK = {"diskCache": {"size": "400Gi"}}
_CLASS = {"diskCache": {"size": "400Gi", "storageClassName": "local-nvme"}}


@pytest.mark.parametrize("changes", [_DISK, _CLASS], ids=["node", "class"])
def test_a_worker_alone_has_the_disk(changes: Manifest) -> None:
    service = _service(render_chart("tp-8", changes))
    check(service)
    assert operator_errors(service) == []
    cluster = service["spec"]["rayClusterConfig"]
    worker = _worker(service)
    assert restricted_violations(worker) == []
    [container] = worker["containers"]
    [mount] = [one for one in container["volumeMounts"] if one["mountPath"] == _FOLDER]
    assert not mount.get("readOnly", False)
    assert mount["name"] in {one["name"] for one in worker["volumes"]}
    head = cluster["headGroupSpec"]["template"]["spec"]
    assert mount["name"] not in {one["name"] for one in head["volumes"]}
    arguments = read_arguments(_arguments(service))
    assert arguments.engine.disk_cache_folder == _FOLDER
    check_options(arguments.engine)


def test_an_empty_directory_counts_as_ephemeral_storage() -> None:
    plain, disk = (_worker(_service(render_chart("tp-8", one))) for one in ({}, _DISK))
    [volume] = [one for one in disk["volumes"] if one["name"] == "disk-cache"]
    assert volume["emptyDir"] == {"sizeLimit": "400Gi"}
    for kind in ("requests", "limits"):
        without, with_disk = (
            parse_quantity(one["containers"][0]["resources"][kind]["ephemeral-storage"])
            for one in (plain, disk)
        )
        assert with_disk == without + _SIZE


def test_a_claim_of_the_class_is_made_for_each_pod() -> None:
    plain, disk = (_worker(_service(render_chart("tp-8", one))) for one in ({}, _CLASS))
    [volume] = [one for one in disk["volumes"] if one["name"] == "disk-cache"]
    claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local-nvme",
        "resources": {"requests": {"storage": "400Gi"}},
    }
    assert disk["containers"][0]["resources"] == plain["containers"][0]["resources"]


@pytest.mark.parametrize(
    ("ranks", "gpus", "part"),
    [
        # Eight replicas share the disk of a host, one has all of it, or one has two hosts.
        (1, 8, 1 / 8),
        (4, 8, 1 / 2),
        (8, 8, 1.0),
        (16, 8, 2.0),
        (1, 0, 1.0),
        (2, 0, 1.0),
    ],
)
def test_replicas_write_less_than_their_disks_have(ranks: int, gpus: int, part: float) -> None:
    parallel = {"tensorParallelSize": ranks, "gpusPerHost": gpus, "model": "/models/x"}
    written = _arguments(_service(render_chart(None, parallel | _DISK)))["disk_cache_bytes"]
    assert 0.89 * _SIZE * part < written <= 0.9 * _SIZE * part


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"diskCache": {"size": "7Gi"}}, "diskCache.size: 7Gi is not enough for the 8 ranks"),
        ({"diskCache": {"size": "400G"}}, "diskCache.size"),
        ({"diskCache": {"storageClassName": "a"}}, "there is no disk without diskCache.size"),
        (_DISK | {"arguments": {"enable_cpu_prefix_cache": False}}, "nothing would be written"),
        (_DISK | {"arguments": {"num_cpu_blocks": 0}}, "arguments.num_cpu_blocks: with 0"),
        (_DISK | {"arguments": {"disk_cache_bytes": 9}}, "disk_cache_bytes"),
    ],
)
def test_helm_rejects_disks_of_no_use(changes: Manifest, error: str) -> None:
    run = run_helm("tp-8", changes)
    assert run.returncode != 0
    assert error in run.stderr


def _service(manifests: list[Manifest]) -> Manifest:
    [service] = [one for one in manifests if one["kind"] == "RayService"]
    return service


def _worker(service: Manifest) -> Manifest:
    [group] = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod: Manifest = group["template"]["spec"]
    return pod


def _arguments(service: Manifest) -> Manifest:
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    arguments: Manifest = application["args"]
    return arguments
