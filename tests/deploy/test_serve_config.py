"""Ray Serve accepts and runs the Serve configurations of the manifests."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.serving.auth.key_file import digest_of, new_key
from cluster.serving.ray_serve.options import read_arguments
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.deploy.kustomize import overlay
from tests.system.server_process import TINY_LLAMA, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

_MIDDLEWARES = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


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
        module, _, name = _environment(container)[_MIDDLEWARES].partition(":")
        assert callable(getattr(import_module(module), name))


class _Served:
    """The CPU demo on the test cluster, with other ports and local files."""

    def __init__(self, keys: Path) -> None:
        spec = overlay("cpu-demo")["RayService", "pagedray"]["spec"]
        [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
        [self.container] = group["template"]["spec"]["containers"]
        self._config = yaml.safe_load(spec["serveConfigV2"])
        self.http_port, self.grpc_port = free_port(), free_port()
        self._config["http_options"] |= {"host": "127.0.0.1", "port": self.http_port}
        self._config["grpc_options"] |= {"port": self.grpc_port}
        [application] = self._config["applications"]
        assert application["args"]["model"].endswith(f"/{TINY_LLAMA.name}")
        application["args"] |= {
            "model": str(TINY_LLAMA),
            "api_keys": str(keys),
            "num_threads": 1,
            "num_blocks": 256,
        }

    def start(self) -> None:
        environment = {_MIDDLEWARES: _environment(self.container)[_MIDDLEWARES]}
        serve.start(
            http_options=self._config["http_options"],
            grpc_options=self._config["grpc_options"],
            controller_options={"runtime_env": {"env_vars": environment}},
        )
        client = serve.context._get_global_client()
        # Serve's own wait times out after a minute.
        client.deploy_apps(ServeDeploySchema.model_validate(self._config))  # type: ignore[union-attr]  # it is there
        name = self._config["applications"][0]["name"]
        client._wait_for_application_running(name, timeout_s=300)  # type: ignore[union-attr]  # it is there
        client.wait_for_proxies_serving(wait_for_applications_running=True)  # type: ignore[union-attr]  # it is there


@pytest.fixture(scope="module")
def key() -> str:
    return new_key()


@pytest.fixture(scope="module")
def served(
    ray_cluster: None, key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(f'[tenants.demo]\nkeys = ["sha256:{digest_of(key).hex()}"]\n')
    keys.chmod(0o600)
    served = _Served(keys)
    try:
        served.start()
        yield served
    finally:
        serve.shutdown()


def test_http_requires_a_key(served: _Served, key: str) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{served.http_port}", timeout=60.0) as client:
        assert client.get(_ready_path(served.container)).status_code == 200
        body = {"model": TINY_LLAMA.name, "prompt": "import os", "max_tokens": 8}
        assert client.post("/v1/completions", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8


def test_grpc_requires_a_key(served: _Served, key: str) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.ListModels(pb.ListModelsRequest(), timeout=60.0)
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {key}"),)
        answer = stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=60.0)
        assert TINY_LLAMA.name in str(answer)


def _environment(container: Manifest) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def _ready_path(container: Manifest) -> str:
    path: str = container["readinessProbe"]["httpGet"]["path"]
    return path
