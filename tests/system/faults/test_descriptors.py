"""Clients that take every connection: others are served, and a dead rank is replaced."""

from __future__ import annotations

import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.orphan_guard import OrphanGuard
from tests.system.server_process import TINY_LLAMA, free_port, serve_command

MAX_DESCRIPTORS = 256
NUM_IDLE = 1100
# As gRPC's clients begin.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
# The whole of 127.0.0.0/8 is the loopback.
ATTACKER = "127.0.0.2"


class LimitedServer:
    """A server that may open few descriptors."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.grpc_port, self.http_port = free_port(), free_port()
        command, environment = serve_command(TINY_LLAMA, "--device=cpu")
        command += [f"--grpc-port={self.grpc_port}", f"--http-port={self.http_port}"]
        limits = (MAX_DESCRIPTORS, MAX_DESCRIPTORS)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
            )
        self.guard = OrphanGuard(self.process)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/ready").status_code == 200
        return False

    def ranks(self) -> list[psutil.Process]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in family if "serve_controller" in " ".join(one.cmdline())]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LimitedServer]:
    server = LimitedServer(tmp_path / "log")
    try:
        wait_for(server.is_ready, 120.0)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30.0)
        server.guard.release()


def occupy(stack: ExitStack, port: int, first: bytes = b"") -> None:
    """Open connections to a port that stay idle, from one host."""
    for _ in range(NUM_IDLE):
        connection = stack.enter_context(socket.socket())
        connection.bind((ATTACKER, 0))
        connection.settimeout(5.0)
        with suppress(OSError):
            connection.connect(("127.0.0.1", port))
            connection.send(first)


@pytest.mark.slow
def test_a_rank_is_replaced_while_a_host_takes_every_connection(server: LimitedServer) -> None:
    sampling = pagedray_pb2.SamplingParams(max_tokens=800, ignore_eos=True)
    request = pagedray_pb2.GenerateRequest(text="x", sampling=sampling)
    address = f"127.0.0.1:{server.grpc_port}"
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(address))
        stream = pagedray_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        next(stream)
        occupy(stack, server.grpc_port, PREFACE)
        occupy(stack, server.http_port)
        (rank,) = server.ranks()
        rank.kill()
        rank.wait()
        # Other clients are served, and the stream continues.
        wait_for(server.is_ready, 60.0)
        answers = list(stream)
        assert answers[-1].HasField("usage")
        assert answers[-1].usage.num_generated_tokens == sampling.max_tokens
        late = stack.enter_context(grpc.insecure_channel(address))
        service = pagedray_pb2_grpc.GenerationServiceStub(late)
        assert len(list(service.Generate(request, wait_for_ready=True, timeout=60.0))) > 1
    assert len(server.log.read_bytes()) < 100_000
