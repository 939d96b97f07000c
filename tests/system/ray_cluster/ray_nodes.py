"""A head and a worker of Ray, each a process that Kubernetes would run in a pod."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from cluster.cli.deploy_hold import GcsNodes
from tests.fakes import wait_for
from tests.orphan_guard import OrphanGuard
from tests.system.server_process import free_port

DRAIN_S = 20.0
"""How long the worker drains."""
_TIMEOUT_S = 120.0
_PROGRAM = """
import os, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, namespace="held")
class Held:
    # An actor that cannot move, as Serve's controller.
    num_calls = 0
    def call(self):
        self.num_calls += 1
        return self.num_calls, os.getpid()
if sys.argv[2] == "start":
    held = ray.remote(num_cpus=1)(Held).options(name="held", lifetime="detached").remote()
else:
    held = ray.get_actor("held")
print(*ray.get(held.call.remote(), timeout=60))
"""


class RayNodes:
    """A head without CPUs and a worker with an actor, until `stop`."""

    def __init__(self, folder: Path, **variables: str) -> None:
        """Use a folder, and variables of the environment of both."""
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            **variables,
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self._guards: list[OrphanGuard] = []

    def start(self) -> None:
        """Start both, and the actor on the worker, which is called once."""
        self.start_head()
        address = f"--address={self.address}"
        self.worker = self._start("worker", str(DRAIN_S), address, "--num-cpus=1")
        self._run("start")

    def start_head(self) -> None:
        """Start a head, in a folder of its own, and wait until it answers."""
        port = self.address.rpartition(":")[2]
        name = f"head-{len(self._started)}"
        self.head = self._start(name, "0", "--head", f"--port={port}", "--num-cpus=0")
        wait_for(self._answers, 60.0)

    def kill_head(self) -> None:
        """Kill the head with its daemons."""
        family = psutil.Process(self.head.pid).children(recursive=True)
        for process in (psutil.Process(self.head.pid), *family):
            with suppress(psutil.Error):
                process.kill()
        self.head.wait()

    def call(self) -> tuple[int, int]:
        """Call the actor; return how often that was done, and its process."""
        num_calls, pid = self._run("call").split()
        return int(num_calls), int(pid)

    def stop(self) -> None:
        """End what still runs: Ray's daemons are sessions of their own."""
        name = f"RAY_TMPDIR={self._folder}".encode()
        for found in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if name in Path(f"/proc/{found.pid}/environ").read_bytes():
                    found.kill()
        for process in self._started:
            process.kill()
            process.wait()
        for guard in self._guards:
            guard.release()

    def _run(self, what: str) -> str:
        command = [sys.executable, "-c", _PROGRAM, self.address, what]
        done = subprocess.run(
            command,
            check=True,
            timeout=_TIMEOUT_S,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout

    def _start(self, name: str, drain_s: str, *arguments: str) -> subprocess.Popen[bytes]:
        folder = self._folder / name
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments),
                    *("--node-ip-address=127.0.0.1", "--object-store-memory=100000000"),
                    *("--min-worker-port=0", "--max-worker-port=0"),
                ],
                env=self._environment
                | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": drain_s, "RAY_TMPDIR": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started.append(process)
        self._guards.append(OrphanGuard(process))
        return process

    def _answers(self) -> bool:
        try:
            return GcsNodes(self.address).num_draining() == 0
        except ConnectionError:
            return False
