"""Envoy routes to a real Serve application by the routes that the chart renders."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.deploy.helm.chart import needs_helm, render_chart
from tests.deploy.network.envoy import envoy_config, running_envoy
from tests.deploy.serve_demo import ServeDemo, running_demo
from tests.deploy.tools import needs_tool
from tests.system.server_process import TINY_LLAMA, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

pytestmark = [pytest.mark.slow, needs_helm, needs_tool("envoy")]

_HOST = "llm.example.com"
_GATEWAY = {"enabled": True, "name": "gateway", "hostnames": [_HOST]}
_TEN_MINUTES = 600.0


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
