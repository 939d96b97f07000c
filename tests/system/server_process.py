"""`pagedray` in a separate process, as a user starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import httpx
import psutil

if TYPE_CHECKING:
    from types import TracebackType

__all__ = [
    "ROOT",
    "TINY_LLAMA",
    "Finished",
    "ServerProcess",
    "free_port",
    "ready_line",
    "run_pagedray",
    "serve_command",
]

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
START_TIMEOUT_S = 120.0
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float


def run_pagedray(*arguments: str, timeout_s: float = 120.0) -> Finished:
    """Run a command of pagedray until it exits."""
    started_s = time.monotonic()
    done = subprocess.run(
        _command(*arguments),
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - started_s)


def serve_command(folder: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves a folder on free ports, and its environment."""
    ports = ("--grpc-port=0", "--http-port=0")
    return _command("serve", str(folder), *ports, *arguments), _environment()


def ready_line(server: subprocess.Popen[str]) -> str:
    """Return the line with the addresses of a server, once it is ready."""
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("Ready:"):
            return line
    raise AssertionError("The server ended before it was ready.")


def free_port() -> int:
    """Return a loopback port that was just free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(slots=True)
class ServerProcess:
    """`pagedray serve` as a context manager, on the shipped model by default."""

    arguments: tuple[str, ...]
    folder: Path = TINY_LLAMA
    log: Path | None = None
    """Where its standard error goes; None is that of the test."""
    grpc_port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    _process: subprocess.Popen[str] | None = None
    # Kept open, so that reading the metrics does not change what the server holds.
    _http: httpx.Client = field(
        default_factory=lambda: httpx.Client(limits=httpx.Limits(keepalive_expiry=2.0))
    )

    @property
    def pid(self) -> int:
        """The process id of the server."""
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        """The base URL of HTTP."""
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        """Start it and wait until it is ready."""
        log = None if self.log is None else self.log.open("w")
        self._process = subprocess.Popen(
            _command(
                "serve",
                str(self.folder),
                "--device=cpu",
                "--num-threads=1",
                f"--grpc-port={self.grpc_port}",
                f"--http-port={self.http_port}",
                *self.arguments,
            ),
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        if log is not None:
            log.close()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("Ready:"):
                return
        # An open pipe would cause a ResourceWarning in a later test.
        self._process.stdout.close()
        self._http.close()
        raise AssertionError(f"The server ended with exit code {self._process.wait()}.")

    def metrics(self) -> dict[str, float]:
        """Return its metrics, by name and labels."""
        text = self._http.get(f"{self.url}/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def family(self) -> list[psutil.Process]:
        """Return it and all its descendants."""
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def named(self, name: str) -> list[psutil.Process]:
        """Return its descendants of a name, such as `raylet` and `gcs_server`."""
        return [process for process in self.family() if process.name() == name]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of its ranks."""
        return self.named("ray::GpuWorker")

    def is_ready(self) -> bool:
        """Return what /ready answers."""
        return httpx.get(f"{self.url}/ready").status_code == 200

    def interrupt(self, timeout_s: float) -> int:
        """Send Ctrl-C and return the exit code."""
        self.send(signal.SIGINT)
        return self.wait(timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Wait for it to exit and return the exit code."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process is not None
        self._http.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(15.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli", *arguments]


def _environment() -> dict[str, str]:
    # What tests set for themselves, the server is to do without them.
    ours = {name: value for name, value in os.environ.items() if name != _FORK_SUPPORT}
    return {**ours, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
