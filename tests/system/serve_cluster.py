"""PagedRay on Ray Serve in a running Ray cluster, with the state that its replicas report."""

import asyncio
import time
from contextlib import suppress
from typing import Any, Self

import httpx
import ray
from ray import serve
from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeDeploySchema

from cluster.serving.ray_serve.deployment import build_app
from cluster.serving.server_info import ServerLoads
from tests.system.server_process import TINY_LLAMA, free_port

SMALL = {
    "model": str(TINY_LLAMA),
    "num_replicas": 2,
    "device": "cpu",
    "num_threads": 1,
    "num_blocks": 2048,
}
"""The arguments of two small replicas."""
_START_LIMIT_S = 300
_GUARDED_HTTP = "cluster.serving.ray_serve.http_proxy:middlewares"
_GUARDED_GRPC = "cluster.serving.ray_serve.grpc_proxy.add_services"
_PLAIN_GRPC = "pagedray.v1.pagedray_pb2_grpc.add_GenerationServiceServicer_to_server"


class ServeCluster:
    """Ray Serve with both frontends on the loopback, as a context manager."""

    def __init__(self, *, is_guarded: bool = True) -> None:
        """Without guards Serve's proxies run without our gRPC callbacks."""
        self._is_guarded = is_guarded
        self.http_port = free_port()
        self.grpc_port = free_port()

    @property
    def url(self) -> str:
        """The base URL of HTTP."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        """The address of gRPC."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def handle(self) -> DeploymentHandle[Any]:
        """A handle to the deployment."""
        return serve.get_app_handle("default")

    def start(self) -> None:
        """Start Serve without an application."""
        # Serve restarts a proxy that is not ready in time, and starting Serve then fails.
        variables = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{_START_LIMIT_S}"}
        if self._is_guarded:
            variables |= {
                "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": _GUARDED_HTTP,
                "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
                "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
                "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": f"{2**26}",
            }
        serve.start(
            http_options={"host": "127.0.0.1", "port": self.http_port},
            grpc_options={
                "port": self.grpc_port,
                "grpc_servicer_functions": [_GUARDED_GRPC if self._is_guarded else _PLAIN_GRPC],
            },
            controller_options={"runtime_env": {"env_vars": variables}},
        )

    def deploy(self, **arguments: object) -> None:
        """Deploy the application, or redeploy it, and wait until all replicas are replaced."""
        serve.run(build_app(SMALL | arguments), name="default", route_prefix="/")

    def deploy_config(self, config: ServeDeploySchema) -> None:
        """Deploy a Serve config file, as `serve deploy` does."""
        client = serve.context._get_global_client()
        # Serve's own wait times out after a minute.
        client.deploy_apps(config)  # type: ignore[union-attr]  # it is there
        client._wait_for_application_running("default", timeout_s=_START_LIMIT_S)  # type: ignore[union-attr]  # it is there
        client.wait_for_proxies_serving(wait_for_applications_running=True)  # type: ignore[union-attr]  # it is there

    def replica_pids(self, state: str = "RUNNING") -> dict[str, int]:
        """Return the process id of each replica in a state, by name."""
        return {
            one["replica_id"]: one["pid"]
            for one in self._details()["replicas"]
            if one["state"] == state and one.get("pid")
        }

    def proxy(self) -> ActorHandle[Any]:
        """Return Serve's proxy, the only one on this node."""
        controller = serve.context._get_global_client()._controller  # type: ignore[union-attr]  # it is there
        (proxy,) = ray.get(controller.get_proxies.remote()).values()
        return proxy  # type: ignore[no-any-return]  # Serve's controller is not typed

    async def loads(self, key: str | None = None) -> list[ServerLoads]:
        """Return the load of each replica, asked with an API key if keys are required."""
        arguments = {} if key is None else {"key": key}
        broadcast = self.handle.broadcast("loads", **arguments)
        loads: list[ServerLoads] = await broadcast.results_async()
        return loads

    async def until_proxied(self, timeout_s: float = 300.0) -> float:
        """Wait until the proxy answers that a replica is ready; return how long it took."""
        started_s = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=30.0) as client:
            while (elapsed_s := time.monotonic() - started_s) < timeout_s:
                with suppress(httpx.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return elapsed_s
                await asyncio.sleep(0.1)
        raise TimeoutError("The proxy did not come back.")

    async def until_idle(self, timeout_s: float = 300.0) -> None:
        """Wait until no replica has calls, or blocks in use."""
        deadline_s = time.monotonic() + timeout_s
        while not all(
            not one.calls and one.num_free_blocks == one.num_blocks for one in await self.loads()
        ):
            assert time.monotonic() < deadline_s, "Calls or blocks are left."
            await asyncio.sleep(0.2)

    # Any: Serve's status for its dashboard.
    def _details(self) -> dict[str, Any]:
        details = serve.context._get_global_client().get_serve_details()  # type: ignore[union-attr]  # it is there
        deployment: dict[str, Any] = details["applications"]["default"]["deployments"]["PagedRay"]
        return deployment

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        serve.shutdown()
