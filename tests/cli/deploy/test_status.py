"""`pagedray deploy status`: says in words what a RayService waits for."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from cluster.cli.commands import main
from cluster.cli.deploy.status import status_lines
from tests.cli.deploy.kubernetes_objects import (
    NOT_READY,
    READY,
    Object,
    application,
    cluster,
    pod,
    service,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_a_service_that_serves_is_one_line() -> None:
    running = cluster(applicationStatuses=application("RUNNING", status="HEALTHY"))
    ready = service(conditions=[READY], numServeEndpoints=2, activeServiceStatus=running)
    assert status_lines(ready, []) == ["pagedray serves, with 2 pods."]


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, "KubeRay has not seen it"),
        ({"observedGeneration": 1, "conditions": [NOT_READY]}, "not seen the last change"),
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
        ({"conditions": [NOT_READY]}, "has not created a Ray cluster yet"),
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
                "conditions": [NOT_READY],
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
    _, *lines = status_lines(service(conditions=[NOT_READY, suspending]), [])
    assert lines == ["KubeRay deletes its Ray cluster and service, since it is to be suspended."]


def test_an_upgrade_names_both_clusters() -> None:
    during = service(
        conditions=[READY],
        numServeEndpoints=1,
        activeServiceStatus=cluster("old"),
        pendingServiceStatus=cluster("new", state={"readyWorkerReplicas": 0}),
    )
    assert status_lines(during, []) == [
        "pagedray serves, with 1 pod.",
        "An upgrade is in progress: the cluster old serves until new is ready.",
        "Cluster new: 0 of 1 worker pods are ready.",
    ]


def test_the_objects_of_other_releases_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = pod("other-1", conditions=[{"type": "PodScheduled", "status": "False"}])
    other["metadata"]["labels"] = {"app.kubernetes.io/name": "other"}
    ready = service(conditions=[READY], numServeEndpoints=1, activeServiceStatus=cluster())
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
    waiting = service(conditions=[NOT_READY])
    file.write_text(json.dumps({"kind": "List", "items": [worker, *claims, waiting]}))
    assert main(["deploy", "status", "--file", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("Claim ")] == list(names)


def test_kubectl_is_asked_for_the_namespace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "kubectl"
    answer = json.dumps({"kind": "List", "items": [service(conditions=[NOT_READY])]})
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
