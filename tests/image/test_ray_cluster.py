"""The image serves on a Ray cluster as the rendered manifests of `cpu-demo` run it.

The tests run in the order of this file: the last ones end pods.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.image.open_stream import GrpcStream, HttpStream, OpenStream
from tests.image.ray_cluster import wait_until

if TYPE_CHECKING:
    from tests.image.ray_cluster import RayCluster

pytestmark = pytest.mark.image

_MODEL = "tiny-llama"
_KERNELS = "/opt/pagedray/attention/kernels/cpu/prebuilt"
_NUM_TOKENS = 900
_MAX_IMAGE_BYTES = 22 * 10**8
_TIMEOUT_S = 60.0


def test_the_image_has_no_packages_for_gpus(started: RayCluster) -> None:
    packages = started.image.packages()
    assert {"ray", "torch", "xgrammar"} <= packages
    for_gpus = ("cuda", "flashinfer", "nvidia", "triton", "xformers")
    assert [name for name in packages if name.startswith(for_gpus)] == []
    assert started.image.num_bytes() < _MAX_IMAGE_BYTES


def test_the_command_of_the_image_prints_its_flags(started: RayCluster) -> None:
    done = started.worker.execute(*started.image.command)
    assert done.returncode == 0, done.stderr
    assert "--tensor-parallel-size" in done.stdout


def test_processes_have_no_privileges(started: RayCluster) -> None:
    for pod in (started.head, started.worker):
        processes = pod.read_processes()
        assert any("raylet" in one["Name"] for one in processes)
        for one in processes:
            assert {*one["Uid"].split(), *one["Gid"].split()} == {"10001"}
            capabilities = {one[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
            assert capabilities == {"0" * 16}
            # Two is the mode with a filter.
            assert (one["NoNewPrivs"], one["Seccomp"]) == ("1", "2")


def test_files_of_the_image_cannot_be_written(started: RayCluster) -> None:
    for path in ("/new", "/opt/pagedray/new", "/home/pagedray/new", "/etc/pagedray/new"):
        rejected = started.worker.execute("touch", path)
        assert "Read-only file system" in rejected.stderr, path
    for path in (
        "/tmp/new",
        "/tmp/ray/new",
        "/dev/shm/new",
        "/home/pagedray/.cache/new",
        "/var/cache/pagedray/new",
    ):
        assert started.worker.execute("touch", path).returncode == 0, path


def test_both_nodes_join_with_the_resources_of_their_pods(started: RayCluster) -> None:
    nodes = started.list_nodes(started.token).json()["data"]["result"]["result"]
    resources = {one["is_head_node"]: one["resources_total"] for one in nodes}
    assert [one["state"] for one in nodes] == ["ALIVE", "ALIVE"]
    assert "CPU" not in resources[True]
    assert resources[False]["CPU"] == 3.0
    assert resources[False]["memory"] == 6 * 2**30
    assert resources[False]["object_store_memory"] == 512 * 2**20


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_ray_rejects_a_client_without_the_token(started: RayCluster, token: str | None) -> None:
    expected = 401 if token is None else 403
    assert started.put_serve_config(token).status_code == expected
    assert started.list_nodes(token).status_code == expected


def test_the_worker_is_ready_once_the_application_runs(served: RayCluster) -> None:
    wait_until(served.worker, "readinessProbe")
    for pod in (served.head, served.worker):
        wait_until(pod, "livenessProbe")


def test_http_requires_a_key(served: RayCluster) -> None:
    url = f"http://{served.worker.address}:8000/v1/completions"
    body = {"model": _MODEL, "prompt": "import os", "max_tokens": 8}
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        assert client.post(url, json=body).status_code == 401
        wrong = {"Authorization": f"Bearer {served.token}"}
        assert client.post(url, json=body, headers=wrong).status_code == 401
        headers = {"Authorization": f"Bearer {served.key}"}
        answer = client.post(url, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_grpc_requires_a_key(served: RayCluster) -> None:
    request = pb.GenerateRequest(
        text="import os", sampling=pb.SamplingParams(max_tokens=8, temperature=0.0)
    )
    with grpc.insecure_channel(f"{served.worker.address}:9000") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as rejection:
            list(stub.Generate(request, timeout=_TIMEOUT_S))
        assert rejection.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {served.key}"),)
        *_, last = stub.Generate(request, metadata=metadata, timeout=_TIMEOUT_S)
    assert last.usage.num_generated_tokens == 8


def test_a_structure_needs_no_package_for_gpus(served: RayCluster) -> None:
    answer = httpx.post(
        f"http://{served.worker.address}:8000/v1/completions",
        json={
            "model": _MODEL,
            "prompt": "def ",
            "max_tokens": 16,
            "structured_outputs": {"choice": ["north", "south"]},
        },
        headers={"Authorization": f"Bearer {served.key}"},
        timeout=_TIMEOUT_S,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] in ("north", "south")


def test_the_kernels_are_those_of_the_image(served: RayCluster) -> None:
    maps = served.worker.execute("sh", "-c", "cat /proc/[0-9]*/maps").stdout
    kernels = {name for line in maps.splitlines() if "/kernels/" in (name := line.split()[-1])}
    assert {name.partition("-")[0] for name in kernels} >= {f"{_KERNELS}/paged_decode"}
    assert all(name.startswith(_KERNELS) for name in kernels)
    # Nothing was compiled, and there is nothing that another user could replace.
    assert served.worker.execute("ls", "/home/pagedray/.cache/pagedray").stdout == ""


def test_a_rank_keeps_prefixes_on_the_disk_of_its_pod(served: RayCluster) -> None:
    # The file has no name.
    opened = served.worker.execute("sh", "-c", "ls -l /proc/[0-9]*/fd").stdout
    assert "/var/cache/pagedray/" in opened
    assert "tmp" not in served.worker.execute("ls", "-A", "/var/cache/pagedray").stdout


def test_the_container_logs_calls_and_no_secrets(served: RayCluster) -> None:
    # Ray's log monitor forwards lines with a delay.
    call = re.compile(r"INFO call id=\S+ tenant=demo frontend=http .*outcome=length")
    wait_for(lambda: call.search(served.worker.log))
    for pod in (served.head, served.worker):
        assert served.key not in pod.log
        assert served.token not in pod.log


def test_streams_end_whole_when_their_pod_gets_sigterm(served: RayCluster) -> None:
    worker = served.worker
    # The service sends requests to the pod until its hook has ended.
    worker.run_pre_stop()
    streams: list[OpenStream] = [
        HttpStream(worker.address, served.key),
        GrpcStream(worker.address, served.key),
    ]
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(stream.read, _NUM_TOKENS) for stream in streams]
        for stream in streams:
            assert stream.flows.wait(_TIMEOUT_S)
        signaled_s = time.monotonic()
        worker.terminate()
        assert [end.result(_TIMEOUT_S) for end in ends] == [_NUM_TOKENS] * len(streams)
    assert all(stream.ended_s > signaled_s for stream in streams)


def test_a_head_that_ends_alone_ends_soon(served: RayCluster) -> None:
    # KubeRay starts the next one when this one has ended.
    assert served.head.run_pre_stop() < 30.0
    assert served.head.terminate() < 30.0
