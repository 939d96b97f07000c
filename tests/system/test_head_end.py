"""The end of the head of a real Ray cluster: alone, and with a worker that drains."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.cli.deploy.drain_wait import GcsNodes, wait_for_drains
from tests.fakes import wait_for
from tests.system.server_process import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

DRAIN_S = 20.0
# Of an actor that cannot move, as Serve's controller.
PROGRAM = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, namespace="held")
class Held:
    def ping(self): return 1
held = ray.remote(num_cpus=1)(Held).options(name="held", lifetime="detached").remote()
ray.get(held.ping.remote())
"""


class Nodes:
    """A head and a worker, each a process that Kubernetes would run in a pod."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start both, and an actor on the worker."""
        port = self.address.rpartition(":")[2]
        self.head = self._start("head", "0", "--head", f"--port={port}", "--num-cpus=0")
        wait_for(self._answers, 60.0)
        address = f"--address={self.address}"
        self.worker = self._start("worker", str(DRAIN_S), address, "--num-cpus=1")
        command = [sys.executable, "-c", PROGRAM, self.address]
        subprocess.run(command, check=True, timeout=120.0, env=self._environment)

    def stop(self) -> None:
        """End what still runs: Ray's daemons are sessions of their own."""
        name = f"RAY_TMPDIR={self._folder}\0".encode()
        for found in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if name in Path(f"/proc/{found.pid}/environ").read_bytes():
                    found.kill()
        for process in self._started:
            process.kill()
            process.wait()

    def _start(self, name: str, drain_s: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments),
                    *("--node-ip-address=127.0.0.1", "--object-store-memory=100000000"),
                    *("--min-worker-port=0", "--max-worker-port=0"),
                ],
                env=self._environment | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": drain_s},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._started.append(process)
        return process

    def _answers(self) -> bool:
        try:
            return GcsNodes(self.address).num_draining() == 0
        except ConnectionError:
            return False


@pytest.fixture
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A cluster with an actor on its worker."""
    found = Nodes(tmp_path_factory.mktemp("ray"))
    try:
        found.start()
        yield found
    finally:
        found.stop()


def test_a_head_waits_for_its_worker_to_drain_and_ends_at_once(nodes: Nodes) -> None:
    gcs = GcsNodes(nodes.address)
    # Nothing drains: the head would end alone.
    assert gcs.num_draining() == 0
    nodes.worker.terminate()
    wait_for(lambda: gcs.num_draining() == 1, 10.0)
    started_s = time.monotonic()
    assert wait_for_drains(gcs, limit_s=3 * DRAIN_S) == "No worker drains"
    assert time.monotonic() - started_s > DRAIN_S / 2
    assert nodes.worker.wait(30.0) is not None
    # The head itself does not drain.
    nodes.head.terminate()
    nodes.head.wait(DRAIN_S / 2)
    with pytest.raises(ConnectionError):
        gcs.num_draining()
