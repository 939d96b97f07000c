"""The pods of KubeRay have the commands and variables that its version 1.7 generates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.deploy.kustomize import overlay
from tests.image.built_image import Mount, PipSettings
from tests.image.kuberay import head_pod, worker_pod

if TYPE_CHECKING:
    from pathlib import Path

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


def test_files_and_folders_are_mounted(tmp_path: Path) -> None:
    certificate, index = tmp_path / "proxy.pem", tmp_path / "index" / "simple"
    certificate.touch()
    index.mkdir(parents=True)
    settings = PipSettings.of(
        [
            f"global.cert='{certificate}'",
            f"global.find-links='{tmp_path}'",
            f"global.index-url='file://{index}'",
        ]
    )
    assert settings.text == (
        f"[global]\ncert = /run/pip/proxy.pem\nfind-links = {tmp_path}\nindex-url = file://{index}\n"
    )
    assert settings.mounts == (
        Mount(certificate, "/run/pip/proxy.pem"),
        Mount(tmp_path, str(tmp_path)),
        Mount(index.parent, str(index.parent)),
    )


def test_the_environment_wins() -> None:
    lines = [":env:.timeout='5'", "global.timeout='7'", "install.no-compile='true'"]
    assert PipSettings.of(lines).text == "[global]\ntimeout = 5\nno-compile = true\n"


def test_addresses_stay_as_they_are() -> None:
    lines = ["global.extra-index-url='https://one.example/simple file:///nowhere/simple'"]
    settings = PipSettings.of(lines)
    assert "https://one.example/simple\n    file:///nowhere/simple" in settings.text
    assert settings.mounts == ()
