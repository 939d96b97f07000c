"""What `pagedray deploy status` says of pods, Jobs and claims."""

from __future__ import annotations

import pytest

from cluster.cli.deploy.status import status_lines
from tests.cli.deploy.kubernetes_objects import (
    NOT_READY,
    Object,
    event,
    pod,
    service,
)


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            pod(
                conditions=[
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ]
            ),
            "Pod pagedray-ranks-1 has no node: 0/3 nodes are available: 3 Insufficient",
        ),
        (
            pod(initContainerStatuses=[{"name": "wait-for-model", "state": {"running": {}}}]),
            "Pod pagedray-ranks-1 waits for the download of the model.",
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "name": "ray-worker",
                        "state": {
                            "waiting": {
                                "reason": "CreateContainerConfigError",
                                "message": 'secret "pagedray-api-keys" not found',
                            }
                        },
                    }
                ]
            ),
            'secret "pagedray-api-keys" not found; create the Secret',
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "name": "ray-worker",
                        "state": {
                            "waiting": {
                                "reason": "CreateContainerConfigError",
                                "message": "failed to create subPath directory for volumeMount",
                            }
                        },
                    }
                ]
            ),
            "volumeMount; check that the claim has the folder storage.subPath.",
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "name": "ray-worker",
                        "state": {"running": {}},
                        "lastState": {"terminated": {"reason": "OOMKilled"}},
                    }
                ]
            ),
            "used more memory than its limit: raise worker.memory.",
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "name": "ray-head",
                        "state": {"terminated": {"reason": "OOMKilled"}},
                    }
                ]
            ),
            "Container ray-head of pod pagedray-ranks-1 used more memory than its limit.",
        ),
        (
            pod(
                phase="Failed",
                reason="Evicted",
                message='Usage of EmptyDir volume "ray-logs" exceeds the limit "4Gi".',
            ),
            'failed: Evicted: Usage of EmptyDir volume "ray-logs" exceeds the limit "4Gi".',
        ),
        (
            {
                "kind": "Job",
                "metadata": {"name": "pagedray-download-1"},
                "status": {"failed": 2, "active": 1},
            },
            "Job pagedray-download-1 downloads the model, after 2 failed tries",
        ),
        (
            {
                "kind": "Job",
                "metadata": {"name": "pagedray-download-1"},
                "status": {"conditions": [{"type": "Failed", "status": "True"}]},
            },
            "Job pagedray-download-1 gave up: read its log",
        ),
        (
            {
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "pagedray-models"},
                "spec": {"accessModes": ["ReadWriteMany"]},
                "status": {"phase": "Pending"},
            },
            "Claim pagedray-models has no volume yet; check that a storage class",
        ),
        (
            pod(
                containerStatuses=[
                    {
                        "name": "ray-worker",
                        "state": {"waiting": {"reason": "ErrImageNeverPull"}},
                    }
                ]
            ),
            "does not start: ErrImageNeverPull; the node does not have the image",
        ),
        (
            pod(
                phase="Failed",
                containerStatuses=[
                    {
                        "name": "ray-worker",
                        "state": {"terminated": {"reason": "Error", "exitCode": 1}},
                    }
                ],
            ),
            "ended with exit code 1: read its log (kubectl logs pagedray-ranks-1 -c ray-worker).",
        ),
    ],
)
def test_pods_jobs_and_claims_say_why(other: Object, line: str) -> None:
    [_, _, *lines] = status_lines(service(conditions=[NOT_READY]), [other])
    assert len(lines) == 1
    assert line in lines[0]


def test_a_failed_try_of_a_download_is_told_by_its_job_alone() -> None:
    failed = pod(
        "pagedray-download-1-x",
        phase="Failed",
        containerStatuses=[{"name": "download", "state": {"terminated": {"exitCode": 1}}}],
    )
    failed["metadata"]["ownerReferences"] = [{"kind": "Job", "name": "pagedray-download-1"}]
    job = {"kind": "Job", "metadata": {"name": "pagedray-download-1"}, "status": {"failed": 1}}
    [_, _, *lines] = status_lines(service(conditions=[NOT_READY]), [job, failed])
    assert lines == [
        "Job pagedray-download-1 downloads the model, after 1 failed tries (kubectl logs --follow "
        "job/pagedray-download-1)."
    ]


def test_a_secret_that_is_missing_is_found_in_the_last_event() -> None:
    creating = pod(
        containerStatuses=[
            {"name": "ray-worker", "state": {"waiting": {"reason": "ContainerCreating"}}}
        ]
    )
    events = [
        event("Pod", "pagedray-ranks-1", "FailedMount", "secret not found", "2026-01-01T00:02:00Z"),
        event("Pod", "pagedray-ranks-1", "FailedMount", "timed out", "2026-01-01T00:01:00Z"),
        # It has a node since.
        event("Pod", "pagedray-ranks-1", "FailedScheduling", "no GPU", "2026-01-01T00:03:00Z"),
        event("Pod", "pagedray-ranks-2", "FailedMount", "another", "2026-01-01T00:04:00Z"),
    ]
    [_, _, *lines] = status_lines(service(conditions=[NOT_READY]), [creating, *events])
    assert lines == ["Pod pagedray-ranks-1 does not start: secret not found."]


def test_events_are_older_than_a_container_that_runs() -> None:
    running = pod(containerStatuses=[{"name": "ray-worker", "state": {"running": {}}}])
    failed = event("Pod", "pagedray-ranks-1", "FailedMount", "secret not found")
    [_, _, *lines] = status_lines(service(conditions=[NOT_READY]), [running, failed])
    assert lines == []


def test_a_job_without_a_pod_and_a_claim_without_a_volume_say_why() -> None:
    job = {"kind": "Job", "metadata": {"name": "pagedray-download-1"}, "status": {}}
    claim: Object = {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "pagedray-ranks-1-disk-cache"},
        "spec": {"accessModes": ["ReadWriteOnce"]},
        "status": {"phase": "Pending"},
    }
    worker = pod()
    worker["spec"]["volumes"].append({"name": "disk-cache", "ephemeral": {}})
    events = [
        event("Job", "pagedray-download-1", "FailedCreate", "exceeded quota: pods=0"),
        event("PersistentVolumeClaim", claim["metadata"]["name"], "ProvisioningFailed", "no class"),
    ]
    [_, _, *lines] = status_lines(service(conditions=[NOT_READY]), [claim, job, worker, *events])
    assert lines == [
        "Claim pagedray-ranks-1-disk-cache has no volume yet: no class; check that a storage class "
        "provides ReadWriteOnce (diskCache.storageClassName).",
        "Job pagedray-download-1 has no pod: exceeded quota: pods=0.",
    ]
