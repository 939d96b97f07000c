"""`pagedray deploy status`: says in words what a RayService waits for."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

import pytest

from cluster.cli.commands import main
from cluster.cli.deploy.status import status_lines

if TYPE_CHECKING:
    from pathlib import Path

# Any: JSON of Kubernetes.
Object = dict[str, Any]

_READY = {"type": "Ready", "status": "True", "reason": "NonZeroServeEndpoints"}
_NOT_READY = {"type": "Ready", "status": "False", "reason": "ZeroServeEndpoints"}
_LABELS = {"app.kubernetes.io/name": "pagedray"}


def service(**status: Any) -> Object:  # Any: as above.
    return {
        "kind": "RayService",
        "metadata": {"name": "pagedray", "generation": 2},
        "spec": {},
        "status": {"observedGeneration": 2, **status} if status else {},
    }


def cluster(name: str = "pagedray-abc", **changes: Any) -> Object:  # Any: as above.
    state = {"desiredWorkerReplicas": 1, "readyWorkerReplicas": 1, **changes.pop("state", {})}
    return {"rayClusterName": name, "rayClusterStatus": state, **changes}


def application(_status: str, **deployment: str) -> Object:
    return {
        "pagedray": {
            "status": _status,
            "serveDeploymentStatuses": {"Replica": deployment} if deployment else {},
        }
    }


def pod(name: str = "pagedray-ranks-1", **status: Any) -> Object:  # Any: as above.
    metadata = {"name": name, "labels": _LABELS}
    claim = {"persistentVolumeClaim": {"claimName": "pagedray-models"}}
    spec = {"volumes": [{"name": "models", **claim}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def test_a_service_that_serves_is_one_line() -> None:
    running = cluster(applicationStatuses=application("RUNNING", status="HEALTHY"))
    ready = service(conditions=[_READY], numServeEndpoints=2, activeServiceStatus=running)
    assert status_lines(ready, []) == ["pagedray serves, with 2 pods."]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, "KubeRay has not seen it"),
        ({"observedGeneration": 1, "conditions": [_NOT_READY]}, "not seen the last change"),
        (
            {
                "conditions": [
                    {
                        "type": "Ready",
                        "status": "False",
                        "reason": "ValidationFailed",
                        "message": "The RayService spec is invalid",
                    }
                ]
            },
            "KubeRay rejects it: The RayService spec is invalid.",
        ),
        ({"conditions": [_NOT_READY]}, "has not created a Ray cluster yet"),
        (
            {
                "pendingServiceStatus": cluster(
                    state={
                        "readyWorkerReplicas": 0,
                        "conditions": [
                            {
                                "type": "HeadPodReady",
                                "status": "False",
                                "reason": "ContainersNotReady",
                                "message": "containers with unready status: [ray-head]",
                            }
                        ],
                    }
                )
            },
            "the head pod is not ready: containers with unready status: [ray-head].",
        ),
        (
            {"pendingServiceStatus": cluster(state={"readyWorkerReplicas": 0})},
            "Cluster pagedray-abc: 0 of 1 worker pods are ready.",
        ),
        (
            {"pendingServiceStatus": cluster(applicationStatuses=application("DEPLOYING"))},
            "Application pagedray starts: its replicas load the model.",
        ),
        (
            {
                "activeServiceStatus": cluster(
                    applicationStatuses=application(
                        "DEPLOY_FAILED",
                        status="DEPLOY_FAILED",
                        message="Traceback\n  File\nCheckpointError: /models/x is missing.",
                    )
                )
            },
            "Deployment Replica failed to start: Traceback File CheckpointError: /models/x is",
        ),
        (
            {
                "activeServiceStatus": cluster(applicationStatuses=application("RUNNING")),
                "conditions": [_NOT_READY],
            },
            "No pod has a Serve proxy that is ready",
        ),
    ],
)
def test_what_it_waits_for_is_said(status: Object, line: str) -> None:
    first, *lines = status_lines(service(**status), [])
    assert first == "pagedray does not serve yet."
    assert any(line in one for one in lines), lines


def test_a_rejected_change_is_not_one_that_kuberay_has_not_seen() -> None:
    # KubeRay leaves observedGeneration as it is when it refuses a change.
    refused = {"type": "Ready", "status": "False", "reason": "ValidationFailed", "message": "no"}
    _, *lines = status_lines(service(observedGeneration=1, conditions=[refused]), [])
    assert lines == ["KubeRay rejects it: no."]


def test_a_service_that_is_being_suspended_says_so() -> None:
    suspending = {"type": "Suspending", "status": "True", "reason": "SuspendInProgress"}
    _, *lines = status_lines(service(conditions=[_NOT_READY, suspending]), [])
    assert lines == ["KubeRay deletes its Ray cluster and service, since it is to be suspended."]


def test_an_upgrade_names_both_clusters() -> None:
    during = service(
        conditions=[_READY],
        numServeEndpoints=1,
        activeServiceStatus=cluster("old"),
        pendingServiceStatus=cluster("new", state={"readyWorkerReplicas": 0}),
    )
    assert status_lines(during, []) == [
        "pagedray serves, with 1 pod.",
        "An upgrade is in progress: the cluster old serves until new is ready.",
        "Cluster new: 0 of 1 worker pods are ready.",
    ]


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
    [_, _, *lines] = status_lines(service(conditions=[_NOT_READY]), [other])
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
    [_, _, *lines] = status_lines(service(conditions=[_NOT_READY]), [job, failed])
    assert lines == [
        "Job pagedray-download-1 downloads the model, after 1 failed tries (kubectl logs --follow "
        "job/pagedray-download-1)."
    ]


def event(kind: str, name: str, reason: str, message: str, time: str = "") -> Object:
    return {
        "kind": "Event",
        "metadata": {"name": f"{name}.{time or reason}"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": time or None,
    }


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
    [_, _, *lines] = status_lines(service(conditions=[_NOT_READY]), [creating, *events])
    assert lines == ["Pod pagedray-ranks-1 does not start: secret not found."]


def test_events_are_older_than_a_container_that_runs() -> None:
    running = pod(containerStatuses=[{"name": "ray-worker", "state": {"running": {}}}])
    failed = event("Pod", "pagedray-ranks-1", "FailedMount", "secret not found")
    [_, _, *lines] = status_lines(service(conditions=[_NOT_READY]), [running, failed])
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
    [_, _, *lines] = status_lines(service(conditions=[_NOT_READY]), [claim, job, worker, *events])
    assert lines == [
        "Claim pagedray-ranks-1-disk-cache has no volume yet: no class; check that a storage class "
        "provides ReadWriteOnce (diskCache.storageClassName).",
        "Job pagedray-download-1 has no pod: exceeded quota: pods=0.",
    ]


def test_the_objects_of_other_releases_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = pod("other-1", conditions=[{"type": "PodScheduled", "status": "False"}])
    other["metadata"]["labels"] = {"app.kubernetes.io/name": "other"}
    ready = service(conditions=[_READY], numServeEndpoints=1, activeServiceStatus=cluster())
    file = tmp_path / "list.json"
    claim = {"kind": "PersistentVolumeClaim", "status": {"phase": "Pending"}}
    claims = [claim | {"metadata": {"name": name}} for name in ("others", "other-1-disk-cache")]
    file.write_text(json.dumps({"kind": "List", "items": [ready, other, *claims, pod()]}))
    assert main(["deploy", "status", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "pagedray serves, with 1 pod.\n"


def test_claims_of_the_pods_are_the_releases_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = pod()
    worker["spec"]["volumes"].append({"name": "disk-cache", "ephemeral": {}})
    names = ("pagedray-models", "pagedray-ranks-1-disk-cache")
    claim = {"kind": "PersistentVolumeClaim", "status": {"phase": "Pending"}}
    claims = [claim | {"metadata": {"name": name}} for name in names]
    file = tmp_path / "list.json"
    waiting = service(conditions=[_NOT_READY])
    file.write_text(json.dumps({"kind": "List", "items": [worker, *claims, waiting]}))
    assert main(["deploy", "status", "--file", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("Claim ")] == list(names)


def test_kubectl_is_asked_for_the_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    answer = json.dumps({"kind": "List", "items": [service(conditions=[_NOT_READY])]})
    program.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["deploy", "status", "--namespace", "llm"]) == 1
    assert "does not serve yet" in capsys.readouterr().out
    assert "--namespace llm" in (tmp_path / "asked").read_text()


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("It was refused", "It was refused."),
        ("It was refused.", "It was refused."),
        ("Refused - is the port right?", "Refused - is the port right?"),
    ],
)
def test_kubectl_says_why_it_fails(
    said: str,
    shown: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "kubectl"
    program.write_text(f"#!/bin/sh\necho 'E1126 1 memcache.go' >&2\necho '{said}' >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert main(["deploy", "status"]) == 2
    assert capsys.readouterr().err == f"pagedray: error: kubectl failed: {shown}\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not JSON of Kubernetes"),
        ("[]", "is not JSON of Kubernetes"),
        ('{"kind": "RayService", "metadata": {}}', "is not JSON of Kubernetes"),
        (
            '{"kind": "RayService", "metadata": {"name": "other"}}',
            "There is no RayService 'pagedray'; those found: other.",
        ),
    ],
)
def test_other_input_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, error: str
) -> None:
    file = tmp_path / "one.json"
    file.write_text(text)
    assert main(["deploy", "status", "--file", str(file)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert error in line
