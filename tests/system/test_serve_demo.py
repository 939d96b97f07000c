"""Ray Serve runs the Serve configuration of the CPU demo, whose frontends require a key."""

from collections.abc import Iterator

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.deploy.kustomize import Manifest
from tests.deploy.serve_demo import ServeDemo, running_demo
from tests.system.server_process import TINY_LLAMA


@pytest.fixture(scope="module")
def demo(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeDemo]:
    with running_demo(tmp_path_factory.mktemp("keys")) as demo:
        yield demo


def test_http_requires_a_key(demo: ServeDemo) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{demo.http_port}", timeout=60.0) as client:
        assert client.get(_ready_path(demo.container)).status_code == 200
        body = {
            "model": TINY_LLAMA.name,
            "prompt": "import os",
            "max_tokens": 8,
            "ignore_eos": True,
        }
        assert client.post("/v1/completions", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {demo.key}"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8


def test_grpc_requires_a_key(demo: ServeDemo) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{demo.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as rejection:
            stub.ListModels(pb.ListModelsRequest(), timeout=60.0)
        assert rejection.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {demo.key}"),)
        answer = stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=60.0)
        assert TINY_LLAMA.name in str(answer)


def _ready_path(container: Manifest) -> str:
    path: str = container["readinessProbe"]["httpGet"]["path"]
    return path
