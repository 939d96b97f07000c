"""Targets: a server with its processes, into which faults are injected."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import psutil

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.chaos.events import History, ServerExited, ServerStarted
from tests.orphan_guard import OrphanGuard
from tests.process_ends import still_running
from tests.system.server_process import ROOT, TINY_LLAMA, free_port, serve_command

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Unhandled error")
_TRACEBACK_LENGTH = 3000
_SIZE = "512m"
_PART = bytes(2**20)

_STOP_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 240.0
_START_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The resources that all replicas of a target hold together."""

    num_calls: int
    num_blocks: int
    num_free_blocks: int

    @property
    def is_quiet(self) -> bool:
        """Whether there is no call and every block is free."""
        return self.num_calls == 0 and self.num_free_blocks == self.num_blocks


class Target(ABC):
    """A running server, and how its processes are found."""

    name: str
    grpc_target: str
    url: str
    model: str
    num_ranks: int
    """Rank processes when nothing is wrong; 0 if ranks run in the servers."""
    num_servers: int
    can_resume: bool = False
    """Whether clients can resume their streams."""
    disk: SmallDisk | None = None
    """Where it writes temporary files, if that is a file system of its own."""

    descriptor_limit: int | None = None
    """How many descriptors its servers may open, if that is few."""

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """End it and all its processes."""

    @abstractmethod
    def servers(self) -> list[psutil.Process]:
        """Return the processes that hold the requests."""

    @abstractmethod
    def family(self) -> list[psutil.Process]:
        """Return all processes, Ray's included."""

    @abstractmethod
    async def holdings(self, key: str) -> Holdings:
        """Return what it holds, asked with the key of an admin."""

    @abstractmethod
    def tracebacks(self) -> list[str]:
        """Return the Python tracebacks in its logs, shortened."""

    async def all_serve(self, key: str) -> bool:
        """Return whether every server is ready, asked with an API key.

        Where there is one server, `/ready` has already answered for it.
        """
        return True

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        return named(self.family(), "GpuWorker")

    def is_whole(self) -> bool:
        """Whether all ranks and servers are there; spare ranks may be there too."""
        return (
            len(self.ranks()) >= self.num_ranks
            and sum(map(psutil.Process.is_running, self.servers())) == self.num_servers
        )


def tracebacks_in(log: Path) -> list[str]:
    """Return the Python tracebacks in a log, shortened, and those that Ray writes of actors."""
    _, *found = _TRACEBACK.split(log.read_text(errors="replace"))
    return [one[:_TRACEBACK_LENGTH] for one in found]


def named(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Return the living processes whose command line has a word."""
    found = []
    for process in processes:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


class SmallDisk:
    """A tmpfs as a context manager; `path` is the folder on which it is mounted."""

    def __init__(self) -> None:
        # A short path: sockets in it have at most 107 characters.
        self.path = Path(tempfile.mkdtemp(prefix="disk-", dir="/tmp"))

    @staticmethod
    def can_mount() -> bool:
        """Whether this process may mount file systems."""
        return os.geteuid() == 0

    def fill(self) -> None:
        """Write until no space is left."""
        with (self.path / "fill").open("wb", buffering=0) as file:
            try:
                while file.write(_PART):
                    pass
            except OSError:
                return

    def empty(self) -> None:
        """Give the space back."""
        (self.path / "fill").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_SIZE}", "tmpfs", str(self.path)], check=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        # Lazily, since a process that ends may still have a log open.
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)
        self.path.rmdir()


class ServerTarget(Target):
    """A server with one or more ranks."""

    name = "server"
    num_servers = 1
    can_resume = True

    def __init__(
        self,
        *arguments: str,
        history: History,
        log: Path,
        num_ranks: int,
        folder: Path = TINY_LLAMA,
        disk: SmallDisk | None = None,
        descriptor_limit: int | None = None,
    ) -> None:
        """With 0 rank processes, the rank runs in the server's process."""
        self.num_ranks = num_ranks
        self.model = folder.name
        self._grpc_port, self._http_port = free_port(), free_port()
        self.grpc_target = f"127.0.0.1:{self._grpc_port}"
        self.url = f"http://127.0.0.1:{self._http_port}"
        self._history = history
        self._log_path = log
        self._log = log.open("wb")
        command, self._environment = serve_command(folder, *arguments)
        self.disk = disk
        self.descriptor_limit = descriptor_limit
        if disk is not None:
            self._environment |= {"TMPDIR": str(disk.path), "RAY_TMPDIR": str(disk.path)}
        # The last one of a repeated flag counts.
        ports = (f"--grpc-port={self._grpc_port}", f"--http-port={self._http_port}")
        self._command = [*command, *ports]
        self._process: subprocess.Popen[str] | None = None
        self._guard: OrphanGuard | None = None
        self._started: list[psutil.Process] = []
        """What each server had started when it was ready."""
        self._is_stopping = False
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._ready = threading.Event()

    def start(self) -> None:
        self._launch()
        self._supervisor.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._ready.wait(_START_POLL_S):
            is_starting = self._supervisor.is_alive() and time.monotonic() < deadline_s
            assert is_starting, "The server did not start; see its log."

    def stop(self) -> None:
        self._is_stopping = True
        process = self._process
        assert process is not None
        family = self.family()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        self._supervisor.join(_STOP_TIMEOUT_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        still_running(family, 10.0)
        self._log.close()

    def servers(self) -> list[psutil.Process]:
        process = self._process
        if process is None or process.poll() is not None:
            return []
        try:
            return [psutil.Process(process.pid)]
        except psutil.NoSuchProcess:
            return []

    def family(self) -> list[psutil.Process]:
        # A process is equal to another object for the same one.
        found = dict.fromkeys((*self._of_current_server(), *self._started))
        return [process for process in found if process.is_running()]

    def tracebacks(self) -> list[str]:
        return tracebacks_in(self._log_path)

    async def holdings(self, key: str) -> Holdings:
        metadata = (("authorization", f"Bearer {key}"),)
        async with grpc.aio.insecure_channel(self.grpc_target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            loads = await stub.GetLoads(pb.GetLoadsRequest(), metadata=metadata, timeout=30.0)
        return Holdings(
            num_calls=len(loads.calls),
            num_blocks=loads.num_blocks,
            num_free_blocks=loads.num_free_blocks,
        )

    def _of_current_server(self) -> list[psutil.Process]:
        found = self.servers()
        for server in tuple(found):
            with contextlib.suppress(psutil.Error):
                found += server.children(recursive=True)
        return found

    def _launch(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._guard = OrphanGuard(self._process)
        if self.descriptor_limit is not None:
            # Before it raises the limit, which takes it a second.
            limits = (self.descriptor_limit, self.descriptor_limit)
            resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, limits)

    def _supervise(self) -> None:
        """Read what the server prints until it exits, then start it again."""
        while True:
            process = self._process
            assert process is not None
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    if line.startswith("Ready:"):
                        self._started += self._of_current_server()
                        self._ready.set()
            code = process.wait()
            assert self._guard is not None
            self._guard.release()
            self._history.add(ServerExited(at_s=self._history.now_s, code=code))
            if self._is_stopping or not self._ready.is_set():
                return
            self._launch()
            self._history.add(ServerStarted(at_s=self._history.now_s))
