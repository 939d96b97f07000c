"""Servers without finite logits, steps, output, disk space or descriptors."""

import contextlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.orphan_guard import OrphanGuard, guarded_process
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import (
    TINY_LLAMA,
    ServerProcess,
    free_port,
    ready_line,
    run_pagedray,
    serve_command,
)


@pytest.fixture
def overflowing_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(TINY_LLAMA, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.slow
def test_a_server_without_finite_logits_is_not_ready(overflowing_model: Path) -> None:
    with ServerProcess(("--executor=local",), folder=overflowing_model) as server:
        assert httpx.get(f"{server.url}/ready").status_code == 200
        for number in range(3):
            body = {"model": "model", "prompt": f"Request {number}", "max_tokens": 5}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        # Alive, until a supervisor has seen that it is not ready.
        assert httpx.get(f"{server.url}/health").status_code == 200
        metrics = server.metrics()
        assert metrics["pagedray_healthy"] == 0.0
        assert metrics["pagedray_nonfinite_sequences_total"] >= 4.0


@pytest.mark.slow
def test_it_ends_for_its_supervisor(overflowing_model: Path) -> None:
    with ServerProcess(("--executor=local",), folder=overflowing_model) as server:
        for number in range(3):
            body = {"model": "model", "prompt": f"Request {number}", "max_tokens": 5}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert server.wait(60.0) == 1


# Waits are shorter than in a server that users start.
PROGRAM = """
import sys
from cluster.cli import server
from cluster.cli.commands import main
from cluster.engine import engine_loop
from cluster.scheduling.scheduler import Scheduler

engine_loop._FATAL_STALL_S = 2.0
guard = server._guard
server._guard = lambda engine, loop, limit_s: guard(engine, loop, 5.0)
schedule = Scheduler.schedule

def schedule_or_hang(self, now_s):
    while self.num_open > 1:
        pass
    return schedule(self, now_s)

Scheduler.schedule = schedule_or_hang
sys.exit(main())
"""


def read_repeatedly(url: str) -> None:
    """Read a page, which a server answers until the second request is scheduled."""
    for _ in range(200):
        httpx.get(url, timeout=60.0)


@pytest.mark.slow
def test_a_server_whose_steps_hang_under_their_lock_ends() -> None:
    """The second request makes the step thread hang; the third one blocks the event loop."""
    command, environment = serve_command(
        TINY_LLAMA, "--device=cpu", "--executor=local", "--num-threads=1"
    )
    program = [sys.executable, "-c", PROGRAM, *command[3:]]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(guarded_process(program, environment, stdout=subprocess.PIPE))
        http_port, grpc_port = re.findall(r":(\d+)", ready_line(process))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{grpc_port}"))
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        sampling = pagedray_pb2.SamplingParams(max_tokens=900, ignore_eos=True)
        first = service.Generate(pagedray_pb2.GenerateRequest(text="x", sampling=sampling))
        next(first)
        second = service.Generate(pagedray_pb2.GenerateRequest(text="y", sampling=sampling))
        with pytest.raises(httpx.HTTPError):
            read_repeatedly(f"http://127.0.0.1:{http_port}/metrics")
        for stream in (first, second):
            with pytest.raises(grpc.RpcError) as ended:
                list(stream)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(60.0) == 1


FULL = Path("/dev/full")


@pytest.mark.slow
def test_output_on_a_full_disk_is_lost_and_nothing_else() -> None:
    port = free_port()
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", f"--http-port={port}")
    with (
        FULL.open("w") as full,
        guarded_process(command, environment, stdout=full, stderr=full) as server,
    ):
        wait_for(lambda: server.poll() is not None or is_ready(port), timeout_s=120.0)
        assert is_ready(port)
        body = {"model": "tiny-llama", "prompt": "import", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert answer.status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60.0) == 0


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


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


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk, on which Ray writes."""
    # A short path: Ray creates sockets under it.
    with TemporaryDirectory(prefix="disk", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", folder]
        if subprocess.run(mount, check=False).returncode:
            pytest.skip("mounting a disk requires root")
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    # A buffer would keep the end of the last write, and raise when it is closed.
    with (disk / "large").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))


@pytest.mark.slow
def test_start_on_a_full_disk_is_rejected(disk: Path) -> None:
    fill(disk)
    done = run_pagedray("serve", str(TINY_LLAMA), "--device=cpu", "--grpc-port=0", "--http-port=0")
    assert done.code == 2
    assert "Could not start Ray" in done.err
    assert f"{disk}, with 0 MiB free" in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_rank_is_replaced_while_the_disk_is_full(disk: Path) -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2",)) as server,
        GrpcStreams(server, num_streams=8, num_tokens=600) as streams,
    ):
        streams.start()
        fill(disk)
        server.ranks()[0].kill()
        finished = GrpcStream(num_tokens=600, end="FINISH_REASON_LENGTH")
        assert streams.ended(120.0) == [finished] * 8


NUM_OLDEST = 16
"""A limit that is reached, as the first files of a server stay open; poll() takes so many."""


@contextmanager
def no_more_files(process_id: int) -> Iterator[None]:
    """Let a process open no file or socket until the end of the block."""
    limits = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, (NUM_OLDEST, limits[1]))
    yield
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_rank_that_dies_is_replaced_once_files_can_be_opened(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--tensor-parallel-size=2", "--num-threads=1", "--log-level=warning")
    with (
        ServerProcess(options, log=log) as server,
        GrpcStreams(server, num_streams=4, num_tokens=600) as streams,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/health").status_code == 200
        streams.start()
        with no_more_files(server.pid):
            server.ranks()[1].kill()
            wait_for(lambda: "Ranks could not be started: [Errno 24]" in log.read_text())
            structure = {"structured_outputs": {"choice": ["yes", "no"]}}
            body = {"model": "tiny-llama", "prompt": "x", **structure}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert "Too many open files. Retry later." in answer.text
        finished = GrpcStream(num_tokens=600, end="FINISH_REASON_LENGTH")
        assert streams.ended(120.0) == [finished] * 4
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
    assert "Traceback" not in log.read_text()
