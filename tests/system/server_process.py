"""`pagedray` in a separate process, as a user starts it."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import psutil

from tests.orphan_guard import OrphanGuard

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
START_TIMEOUT_S = 120.0
_PORT = re.compile(r":(\d+)\b")
"""One of the two in the line of a server that is ready."""
_PORTS = range(20_000, 32_000)
"""Neither Linux, for outgoing connections, nor Ray chooses any of them."""
_NUM_TESTERS = 8
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str


def run_pagedray(*arguments: str, timeout_s: float = 300.0) -> Finished:
    """Run a command of pagedray until it exits."""
    done = subprocess.run(
        _command(*arguments),
        cwd=ROOT,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


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
    """Return a loopback port that nothing takes by chance before the caller has bound it."""
    # Of several processes that run tests, each has ports of its own.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_TESTERS
    while True:
        port = random.randrange(_PORTS.start + number, _PORTS.stop, _NUM_TESTERS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _name_of(process: psutil.Process) -> str:
    # Ray starts and ends idle workers at any time.
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


@dataclass(slots=True)
class ServerProcess:
    """`pagedray serve` as a context manager, on the shipped model by default.

    It also ends if this process is killed.
    """

    arguments: tuple[str, ...]
    folder: Path = TINY_LLAMA
    log: Path | None = None
    """Where its standard error goes; None is that of the test."""
    grpc_port: int = field(default=0, init=False)
    http_port: int = field(default=0, init=False)
    _process: subprocess.Popen[str] | None = None
    _guard: OrphanGuard | None = field(default=None, init=False)
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
                "--grpc-port=0",
                "--http-port=0",
                *self.arguments,
            ),
            cwd=ROOT,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        self._guard = OrphanGuard(self._process)
        if log is not None:
            log.close()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("Ready:"):
                self.http_port, self.grpc_port = map(int, _PORT.findall(line))
                return
        # An open pipe would cause a ResourceWarning in a later test.
        self._process.stdout.close()
        self._http.close()
        code = self._process.wait()
        self._guard.release()
        raise AssertionError(f"The server ended with exit code {code}.")

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
        return [process for process in self.family() if _name_of(process) == name]

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

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._guard is not None
        self._http.close()
        self._guard.stop_server(signal.SIGINT)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cluster.cli", *arguments]


def _environment() -> dict[str, str]:
    # The server must not depend on settings that tests make for themselves.
    ours = {name: value for name, value in os.environ.items() if name != _FORK_SUPPORT}
    return {**ours, "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}
