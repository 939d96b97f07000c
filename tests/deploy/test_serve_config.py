"""Ray Serve accepts and runs the Serve configurations of the manifests."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.serving.ray_serve.options import read_arguments
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.deploy.serve_demo import MIDDLEWARES, ServeDemo, environment_of, running_demo
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.kustomize import Manifest


def test_ray_serve_and_the_application_accept_the_configuration(ray_service: Manifest) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(ray_service["spec"]["serveConfigV2"]))
    [application] = config.applications
    assert application.import_path == "pagedray:build_app"
    arguments = read_arguments(application.args)
    # The mount path of the Secret.
    assert arguments.serve.api_keys == "/etc/pagedray/keys.toml"


def test_the_callbacks_of_the_proxies_exist(ray_service: Manifest) -> None:
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    for path in config["grpc_options"]["grpc_servicer_functions"]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))
    cluster = ray_service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        [container] = group["template"]["spec"]["containers"]
        module, _, name = environment_of(container)[MIDDLEWARES].partition(":")
        assert callable(getattr(import_module(module), name))


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
        with pytest.raises(grpc.RpcError) as refusal:
            stub.ListModels(pb.ListModelsRequest(), timeout=60.0)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {demo.key}"),)
        answer = stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=60.0)
        assert TINY_LLAMA.name in str(answer)


def _ready_path(container: Manifest) -> str:
    path: str = container["readinessProbe"]["httpGet"]["path"]
    return path
