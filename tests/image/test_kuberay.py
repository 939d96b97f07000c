"""The pods of KubeRay have the commands and variables that its version 1.7 generates."""

from __future__ import annotations

from tests.deploy.kustomize import overlay
from tests.image.kuberay import head_pod, worker_pod

_SERVICE = "pagedray-x7k2p-head-svc.llm.svc.cluster.local"


def test_the_command_of_the_head() -> None:
    pod = head_pod(overlay("cpu-demo")["RayService", "pagedray"])
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["/bin/bash", "-c", "--"]
    assert container["args"] == [
        "ulimit -n ${RAY_START_ULIMIT_OPEN_FILES:-65536}; "
        "ray start --head  --block  --dashboard-agent-listen-port=52365 "
        " --dashboard-host=0.0.0.0  --memory=4294967296  --metrics-export-port=8080 "
        " --num-cpus=0  --object-store-memory=536870912 "
    ]
    assert "initContainers" not in pod["spec"]


def test_the_command_of_a_worker() -> None:
    pod = worker_pod(overlay("cpu-demo")["RayService", "pagedray"])
    [container] = pod["spec"]["containers"]
    assert container["args"][0].endswith(
        f"; ray start  --address={_SERVICE}:6379  --block  --dashboard-agent-listen-port=52365 "
        " --memory=6442450944  --metrics-export-port=8080  --num-cpus=3 "
        " --object-store-memory=536870912 "
    )
    [wait] = pod["spec"]["initContainers"]
    assert f"ray health-check --address {_SERVICE}:6379" in wait["args"][0]


def test_every_container_has_the_token() -> None:
    pod = worker_pod(overlay("cpu-demo")["RayService", "pagedray"])
    for container in (*pod["spec"]["containers"], *pod["spec"]["initContainers"]):
        env = {one["name"]: one for one in container["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        reference = env["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "pagedray-x7k2p", "key": "auth_token"}
