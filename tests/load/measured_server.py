"""`pagedray serve` on a core of its own, with its output and its memory use."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from typing import TYPE_CHECKING, Self

import grpc
import httpx
import psutil

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.system.server_process import ROOT, TINY_LLAMA, serve_command

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["LOAD_CORE", "SERVER_CORE", "MeasuredServer", "pin_load"]

_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE = _CORES[0]
LOAD_CORE = _CORES[-1]
_STOP_TIMEOUT_S = 20.0
_ADDRESSES = re.compile(r"http://127\.0\.0\.1:(\d+)/v1 and grpc://127\.0\.0\.1:(\d+)\.")


def pin_load() -> None:
    """Keep this process from the core of the server, whose speed it would be part of."""
    os.sched_setaffinity(0, {LOAD_CORE})


class MeasuredServer:
    """A server on some cores, on the shipped model, until the block that holds it is left."""

    def __init__(self, *arguments: str, has_ranks_apart: bool = False) -> None:
        """Ranks that are processes of their own have the core that is not the server's."""
        self._executor = "ray" if has_ranks_apart else "local"
        self._cores = f"{SERVER_CORE},{LOAD_CORE}" if has_ranks_apart else str(SERVER_CORE)
        self._arguments = arguments
        self._log = tempfile.NamedTemporaryFile(prefix="pagedray-load-")  # noqa: SIM115  # closed in __exit__
        self._process: subprocess.Popen[str] | None = None
        self.http_port = 0
        self.grpc_port = 0

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        """Where gRPC is served."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def command(self) -> str:
        """The command as a user types it."""
        pinned = ["taskset -c", self._cores, "pagedray serve examples/tiny-llama"]
        return " ".join([*pinned, *self._all_arguments()])

    def rss_mib(self) -> float:
        """Return the memory of the server and the processes it started, in MiB."""
        process = psutil.Process(self._running.pid)
        return (
            sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])
            / 2**20
        )

    def cpu_s(self) -> float:
        """Return the CPU time that the server has used, in seconds."""
        times = psutil.Process(self._running.pid).cpu_times()
        return float(times.user + times.system)

    def num_generated_tokens(self) -> int:
        """Return how many tokens it has generated."""
        return self._load("num_generated_tokens")

    def is_idle(self) -> bool:
        """Whether it has no sequence."""
        return self._load("num_running") + self._load("num_waiting") == 0

    def log(self) -> str:
        """Return what it has logged."""
        with open(self._log.name, errors="replace") as file:  # noqa: PTH123  # a name, not a path
            return file.read()

    def mistakes(self) -> dict[str, object]:
        """Return how many traces of mistakes it has logged, and the first of them."""
        before, trace, after = self.log().partition("Traceback")
        number = 1 + after.count("Traceback") if trace else 0
        return {
            "tracebacks": number,
            "first": (before[-200:] + trace + after)[:3000] if number else "",
        }

    def answers(self) -> bool:
        """Whether a good request is served on both frontends."""
        body = {"model": "tiny-llama", "prompt": "def", "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30.0)
        if answer.status_code != 200 or answer.json()["usage"]["completion_tokens"] != 2:
            return False
        with grpc.insecure_channel(self.grpc_target) as channel:
            stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
            sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True)
            *_, last = stub.Generate(pb.GenerateRequest(text="def", sampling=sampling), timeout=30)
        return bool(last.usage.num_generated_tokens == 2)

    def __enter__(self) -> Self:
        command, environment = serve_command(TINY_LLAMA, *self._all_arguments())
        self._process = subprocess.Popen(
            ["taskset", "-c", self._cores, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _ADDRESSES.search(line)
            if found is not None:
                self.http_port, self.grpc_port = int(found[1]), int(found[2])
                return self
        self._process.stdout.close()
        raise AssertionError(f"The server ended with {self._process.wait()}: {self.log()}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._running
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        self._log.close()

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def _load(self, name: str) -> int:
        return int(httpx.get(f"{self.url}/loads", timeout=30.0).json()[name])

    def _all_arguments(self) -> tuple[str, ...]:
        executor = f"--executor={self._executor}"
        return (executor, "--device=cpu", "--num-threads=1", *self._arguments)
