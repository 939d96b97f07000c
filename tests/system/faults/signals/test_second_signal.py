"""A second signal ends a server that is draining."""

from __future__ import annotations

import signal

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.system.server_process import ServerProcess


@pytest.mark.parametrize(
    ("executor", "second"),
    [
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.slow),
        ("local", signal.SIGINT),
    ],
)
def test_a_second_signal_ends_the_drain(executor: str, second: signal.Signals) -> None:
    sampling = pagedray_pb2.SamplingParams(max_tokens=900, ignore_eos=True, n=16)
    with (
        ServerProcess((f"--executor={executor}", "--drain-s=300")) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        stream = service.Generate(pagedray_pb2.GenerateRequest(text="x", sampling=sampling))
        next(stream)
        server.send(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        # It waits for the stream, which continues.
        next(stream)
        server.send(second)
        with pytest.raises(grpc.RpcError) as ended:
            list(stream)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.wait(60.0) == 0
