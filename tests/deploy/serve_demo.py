"""Runs the Serve configuration of the CPU demo on a local Ray cluster."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from cluster.serving.auth import digest_of, new_key
from tests.deploy.kustomize import overlay
from tests.system.server_process import TINY_LLAMA, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

__all__ = ["MIDDLEWARES", "ServeDemo", "environment_of", "running_demo"]

MIDDLEWARES = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
_START_LIMIT_S = 300


class ServeDemo:
    """The CPU demo, with other ports and local files."""

    def __init__(self, keys: Path, key: str) -> None:
        spec = overlay("cpu-demo")["RayService", "pagedray"]["spec"]
        [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
        [self.container] = group["template"]["spec"]["containers"]
        self._config = yaml.safe_load(spec["serveConfigV2"])
        self.key = key
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
        """Deploy the application, and wait until it serves."""
        environment = {
            MIDDLEWARES: environment_of(self.container)[MIDDLEWARES],
            # Serve restarts a proxy that is not ready in time, and starting Serve then fails.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{_START_LIMIT_S}",
        }
        serve.start(
            http_options=self._config["http_options"],
            grpc_options=self._config["grpc_options"],
            controller_options={"runtime_env": {"env_vars": environment}},
        )
        client = serve.context._get_global_client()
        # Serve's own wait times out after a minute.
        client.deploy_apps(ServeDeploySchema.model_validate(self._config))  # type: ignore[union-attr]  # it is there
        name = self._config["applications"][0]["name"]
        client._wait_for_application_running(name, timeout_s=_START_LIMIT_S)  # type: ignore[union-attr]  # it is there
        client.wait_for_proxies_serving(wait_for_applications_running=True)  # type: ignore[union-attr]  # it is there


@contextmanager
def running_demo(folder: Path) -> Iterator[ServeDemo]:
    """Run the demo on the Ray cluster of the tests, with its keys in a folder."""
    key = new_key()
    keys = folder / "keys.toml"
    keys.write_text(f'[tenants.demo]\nkeys = ["sha256:{digest_of(key).hex()}"]\n')
    keys.chmod(0o600)
    demo = ServeDemo(keys, key)
    try:
        demo.start()
        yield demo
    finally:
        serve.shutdown()


def environment_of(container: Manifest) -> dict[str, str]:
    """Return the environment of a container whose values are all given."""
    return {one["name"]: one["value"] for one in container["env"]}
