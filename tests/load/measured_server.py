"""`pagedray serve` on its own core, with its log and memory use."""

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

from cluster.serving.auth import digest_of, new_key
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.orphan_guard import OrphanGuard
from tests.system.server_process import ROOT, TINY_LLAMA, serve_command

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MeasuredServer", "pin_load", "write_keys"]

_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE = _CORES[0]
LOAD_CORE = _CORES[-1]
_STOP_TIMEOUT_S = 20.0
_ADDRESSES = re.compile(r"http://127\.0\.0\.1:(\d+)/v1 and grpc://127\.0\.0\.1:(\d+)\.")


def pin_load() -> None:
    """Keep this process off the server's core, so that it does not slow down the server."""
    os.sched_setaffinity(0, {LOAD_CORE})


class MeasuredServer:
    """A server of the bundled model on selected cores, as a context manager."""

    def __init__(
        self,
        *arguments: str,
        has_rank_processes: bool = False,
        max_descriptors: int | None = None,
    ) -> None:
        """With rank processes, the server may use the other core, too.

        `max_descriptors` is its hard limit of open files; None leaves the limit as it is.
        """
        self._executor = "ray" if has_rank_processes else "local"
        self._cores = f"{SERVER_CORE},{LOAD_CORE}" if has_rank_processes else str(SERVER_CORE)
        self._arguments = arguments
        self._prefix = ["taskset", "-c", self._cores]
        if max_descriptors is not None:
            self._prefix += ["prlimit", f"--nofile={max_descriptors}:{max_descriptors}"]
        self._log = tempfile.NamedTemporaryFile(prefix="pagedray-load-")  # noqa: SIM115  # closed in __exit__
        self._process: subprocess.Popen[str] | None = None
        self._guard: OrphanGuard | None = None
        self.http_port = 0
        self.grpc_port = 0

    @property
    def url(self) -> str:
        """The URL of the HTTP server."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        """The address of the gRPC server."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def command(self) -> str:
        """The equivalent shell command."""
        serve = "pagedray serve examples/tiny-llama"
        return " ".join([*self._prefix, serve, *self._all_arguments()])

    def processes(self) -> list[psutil.Process]:
        """Return the server and its child processes."""
        process = psutil.Process(self._running.pid)
        return [process, *process.children(recursive=True)]

    def rss_mib(self) -> float:
        """Return the memory of the server and its child processes in MiB."""
        return sum(one.memory_info().rss for one in self.processes()) / 2**20

    def cpu_s(self) -> float:
        """Return the CPU time of the server in seconds."""
        times = psutil.Process(self._running.pid).cpu_times()
        return float(times.user + times.system)

    def num_generated_tokens(self) -> int:
        """Return the number of generated tokens."""
        return self._load("num_generated_tokens")

    def is_idle(self) -> bool:
        """Return whether it has no sequences."""
        return self._load("num_running") + self._load("num_waiting") == 0

    def log(self) -> str:
        """Return the text of its log."""
        with open(self._log.name, errors="replace") as file:  # noqa: PTH123  # a name, not a path
            return file.read()

    def logged_errors(self) -> dict[str, object]:
        """Return the number of tracebacks in its log, and the first one."""
        before, trace, after = self.log().partition("Traceback")
        number = 1 + after.count("Traceback") if trace else 0
        return {
            "tracebacks": number,
            "first": (before[-200:] + trace + after)[:3000] if number else "",
        }

    def answers(self) -> bool:
        """Return whether both frontends serve a valid request."""
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
            [*self._prefix, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=self._log.fileno(),
            text=True,
            start_new_session=True,
        )
        self._guard = OrphanGuard(self._process)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = _ADDRESSES.search(line)
            if found is not None:
                self.http_port, self.grpc_port = int(found[1]), int(found[2])
                return self
        self._process.stdout.close()
        code = self._process.wait()
        self._guard.release()
        raise AssertionError(f"The server exited with {code}: {self.log()}")

    def __exit__(self, *_: object) -> None:
        assert self._guard is not None
        self._guard.stop_server(signal.SIGINT, timeout_s=_STOP_TIMEOUT_S)
        assert self._running.stdout is not None
        self._running.stdout.close()
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


def write_keys(path: Path, *names: str) -> dict[str, str]:
    """Write a file with a key for each tenant, and return the keys."""
    keys = {name: new_key() for name in names}
    entries = (
        f'[tenants.{name}]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
        for name, key in keys.items()
    )
    path.touch(0o600)
    path.write_text("\n".join(entries))
    return keys
