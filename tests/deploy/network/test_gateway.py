"""Envoy routes to a real Serve application by the routes that the chart renders."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.deploy.helm.chart import needs_helm, render_chart
from tests.deploy.kustomize import needs_tool, seconds_of, tool
from tests.deploy.serve_demo import ServeDemo, running_demo
from tests.orphan_guard import OrphanGuard
from tests.system.server_process import TINY_LLAMA, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

pytestmark = [pytest.mark.slow, needs_helm, needs_tool("envoy")]
_HOST = "llm.example.com"
_GATEWAY = {"enabled": True, "name": "gateway", "hostnames": [_HOST]}
_TEN_MINUTES = 600.0

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_MANAGER = f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_ROUTER = f"{_EXTENSIONS}.filters.http.router.v3.Router"
_OPTIONS = f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions"
_START_S = 30.0
_IDLE_S = 300.0
"""Envoy's default for a stream on which nothing is sent."""


@pytest.fixture(scope="module")
def demo(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeDemo]:
    with running_demo(tmp_path_factory.mktemp("keys")) as demo:
        yield demo


@contextmanager
def gateway(
    demo: ServeDemo, folder: Path, changes: Manifest | None = None, *, seconds: float = 1.0
) -> Iterator[int]:
    """Run Envoy with the routes of the chart, and yield its port."""
    manifests = render_chart("cpu-demo", {"gateway": _GATEWAY | (changes or {})})
    port = free_port()
    backends = {8000: demo.http_port, 9000: demo.grpc_port}
    with running_envoy(envoy_config(manifests, backends, port=port, seconds=seconds), folder):
        yield port


def test_http_and_grpc_share_the_port_of_the_gateway(demo: ServeDemo, tmp_path: Path) -> None:
    with gateway(demo, tmp_path) as port:
        body = {"model": TINY_LLAMA.name, "prompt": "import os", "max_tokens": 8}
        answer = httpx.post(url(port), json=body, headers=headers(demo), timeout=60.0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
        options = [("grpc.default_authority", _HOST)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
            metadata = (("authorization", f"Bearer {demo.key}"),)
            request = pb.GenerateRequest(text="import os", sampling=pb.SamplingParams(max_tokens=8))
            assert list(stub.Generate(request, metadata=metadata, timeout=60.0))


def test_other_hosts_are_not_routed(demo: ServeDemo, tmp_path: Path) -> None:
    with gateway(demo, tmp_path) as port:
        other = headers(demo) | {"Host": "other.example.com"}
        assert httpx.post(url(port), json={}, headers=other, timeout=60.0).status_code == 404


def test_a_stream_of_ten_minutes_is_not_cut(demo: ServeDemo, tmp_path: Path) -> None:
    with gateway(demo, tmp_path) as port:
        started_s = time.monotonic()
        assert stream(demo, port).endswith("data: [DONE]\n\n")
        seconds = (time.monotonic() - started_s) / _TEN_MINUTES
    # The same stream takes ten minutes of this clock.
    with gateway(demo, tmp_path, seconds=seconds) as port:
        assert stream(demo, port).endswith("data: [DONE]\n\n")
    with gateway(demo, tmp_path, {"timeout": "60s"}, seconds=seconds) as port:
        assert not stream(demo, port).endswith("data: [DONE]\n\n")


def stream(demo: ServeDemo, port: int) -> str:
    """Return what arrives of the longest stream that the model has."""
    body = {
        "model": TINY_LLAMA.name,
        "prompt": "import os",
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
    }
    received = ""
    try:
        with httpx.stream(
            "POST", url(port), json=body, headers=headers(demo), timeout=120.0
        ) as answer:
            for text in answer.iter_text():
                received += text
    except httpx.RemoteProtocolError:
        # The gateway has closed the connection.
        pass
    return received


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/completions"


def headers(demo: ServeDemo) -> dict[str, str]:
    return {"Authorization": f"Bearer {demo.key}", "Host": _HOST}


def envoy_config(
    manifests: Sequence[Manifest],
    backends: Mapping[int, int],
    *,
    port: int,
    seconds: float = 1.0,
) -> Manifest:
    """Return a configuration of Envoy with the routes among manifests.

    `backends` are the local ports by those of the service. A second of the routes takes `seconds`.
    """
    kinds = ("GRPCRoute", "HTTPRoute")
    routes = sorted((one for one in manifests if one["kind"] in kinds), key=lambda one: one["kind"])
    [service] = [one["spec"]["serveService"] for one in manifests if one["kind"] == "RayService"]
    protocols = {one["port"]: one["appProtocol"] for one in service["spec"]["ports"]}
    manager = {
        "@type": _MANAGER,
        "stat_prefix": "http",
        "stream_idle_timeout": _duration(_IDLE_S * seconds),
        "route_config": {"virtual_hosts": [_host(routes, seconds)]},
        "http_filters": [{"name": "router", "typed_config": {"@type": _ROUTER}}],
    }
    filters = [{"name": "http", "typed_config": manager}]
    listener = {"name": "http", "address": _address(port), "filter_chains": [{"filters": filters}]}
    clusters = [
        _cluster(str(number), backends[number], is_http_2=protocols[number] == "kubernetes.io/h2c")
        for number in sorted(backends)
    ]
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@contextmanager
def running_envoy(config: Manifest, folder: Path) -> Iterator[None]:
    """Run Envoy until the end of the block."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(config))
    [listener] = config["static_resources"]["listeners"]
    port = listener["address"]["socket_address"]["port_value"]
    command = [tool("envoy"), "--config-path", str(file), "--concurrency", "1"]
    command += ["--use-dynamic-base-id", "--log-level", "error"]
    with subprocess.Popen(command, start_new_session=True) as process, OrphanGuard(process):
        try:
            _wait_for(port, process)
            yield
        finally:
            process.terminate()


def _host(routes: Sequence[Manifest], seconds: float) -> Manifest:
    hostnames = {tuple(one["spec"]["hostnames"]) for one in routes}
    assert len(hostnames) == 1
    entries = [
        entry
        for one in routes
        for rule in one["spec"]["rules"]
        for entry in _entries(rule, seconds)
    ]
    return {"name": "all", "domains": list(*hostnames), "routes": entries}


def _entries(rule: Manifest, seconds: float) -> Iterator[Manifest]:
    """Yield a route of Envoy for each match of a rule."""
    [backend] = rule["backendRefs"]
    # A rule without a timeout has none.
    timeout = seconds_of(rule.get("timeouts", {}).get("request", "0s"))
    action = {"cluster": str(backend["port"]), "timeout": _duration(timeout * seconds)}
    for match in rule.get("matches", [{}]):
        prefix = f"/{match['method']['service']}/" if "method" in match else "/"
        yield {"match": {"prefix": prefix}, "route": action}


def _cluster(name: str, port: int, *, is_http_2: bool) -> Manifest:
    kind = "http2_protocol_options" if is_http_2 else "http_protocol_options"
    options = {"@type": _OPTIONS, "explicit_http_config": {kind: {}}}
    endpoint = {"endpoint": {"address": _address(port)}}
    return {
        "name": name,
        "type": "STATIC",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options
        },
    }


def _address(port: int) -> dict[str, Any]:  # Any: JSON.
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


def _duration(seconds: float) -> str:
    return f"{seconds:.3f}s"


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while time.monotonic() < end_s:
        assert process.poll() is None, "Envoy has ended"
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"Envoy does not listen after {_START_S:.0f} s")
