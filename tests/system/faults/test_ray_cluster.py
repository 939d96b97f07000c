"""A head and a worker of Ray, each a process that Kubernetes would run in a pod."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import ray
from ray._private.ray_constants import WORKER_PROCESS_TYPE_IDLE_WORKER

from cluster.cli.deploy_hold import GcsNodes, wait_for_drains
from tests.fakes import wait_for
from tests.orphan_guard import OrphanGuard, guarded_process
from tests.process_ends import still_running
from tests.system.server_process import (
    ROOT,
    TINY_LLAMA,
    ServerProcess,
    free_port,
    ready_line,
    serve_command,
)

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


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as Ray's sockets need."""
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def nodes(folder: Path) -> Iterator[RayNodes]:
    """A cluster with an actor on its worker."""
    found = RayNodes(folder)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.mark.slow
def test_a_head_waits_for_its_worker_to_drain_and_ends_at_once(nodes: RayNodes) -> None:
    gcs = GcsNodes(nodes.address)
    # Nothing drains: the head would end alone.
    assert gcs.num_draining() == 0
    nodes.worker.terminate()
    wait_for(lambda: gcs.num_draining() == 1, 10.0)
    started_s = time.monotonic()
    assert wait_for_drains(gcs, limit_s=3 * DRAIN_S) == "No worker is draining"
    assert time.monotonic() - started_s > DRAIN_S / 2
    assert nodes.worker.wait(30.0) is not None
    # The head itself does not drain.
    nodes.head.terminate()
    nodes.head.wait(DRAIN_S / 2)
    with pytest.raises(ConnectionError):
        gcs.num_draining()


@pytest.fixture
def kept_nodes(folder: Path) -> Iterator[RayNodes]:
    """The same with the state of the cluster in a folder, as KubeRay configures it."""
    found = RayNodes(
        folder,
        RAY_AUTH_MODE="token",
        RAY_gcs_storage="rocksdb",
        RAY_gcs_storage_path=str(folder / "state"),
        RAY_gcs_rpc_server_reconnect_timeout_s="600",
    )
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.mark.slow
def test_a_head_continues_from_the_state_of_the_one_that_was_killed(kept_nodes: RayNodes) -> None:
    num_calls, pid = kept_nodes.call()
    assert num_calls == 2
    kept_nodes.kill_head()
    kept_nodes.start_head()
    # The worker and its actor, which has its memory, are those from before.
    assert kept_nodes.call() == (3, pid)


_USE_RAY = """
import time
from tests.shared_ray import SharedRay

with SharedRay() as cluster:
    print(cluster.address, flush=True)
    time.sleep(600)
"""


def daemons(process: psutil.Process) -> list[psutil.Process]:
    """Return the daemons of the cluster that a process has started."""
    found = []
    for one in process.children(recursive=True):
        # Ray starts and ends idle workers at any time.
        with suppress(psutil.NoSuchProcess):
            if one.name() in ("gcs_server", "raylet") and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def test_another_process_forks_the_daemons_without_the_handlers_of_grpc(ray_cluster: None) -> None:
    found = daemons(psutil.Process())
    assert {one.name() for one in found} == {"gcs_server", "raylet"}
    (starter,) = {one.parent() for one in found}
    assert starter is not None
    assert starter != psutil.Process()
    assert starter.environ()["GRPC_ENABLE_FORK_SUPPORT"] == "false"
    assert ray.cluster_resources()["CPU"] == 4


@pytest.mark.slow
def test_the_cluster_ends_with_the_process_that_uses_it() -> None:
    command = [sys.executable, "-c", _USE_RAY]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        try:
            assert user.stdout.readline().strip()
            family = psutil.Process(user.pid).children(recursive=True)
            assert len(daemons(psutil.Process(user.pid))) == 2
        finally:
            user.kill()
    assert still_running(family, 60.0) == []


DISABLED = {"RAY_AUTH_MODE": "disabled"}


def test_ray_without_a_token_has_to_be_allowed() -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    done = subprocess.run(
        command,
        env={**environment, **DISABLED},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert "RAY_AUTH_MODE=disabled" in line
    assert "--allow-unauthenticated-ray" in line


@pytest.mark.slow
def test_allowed_ray_without_a_token_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", "--allow-unauthenticated-ray")
    with (
        log.open("w") as errors,
        guarded_process(
            command, {**environment, **DISABLED}, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        ready_line(process)
        process.terminate()
        assert process.wait(120.0) == 0
    assert "does not require a token" in log.read_text()


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="Ray would start one worker, which is the rank")
def test_only_ranks_are_started() -> None:
    with ServerProcess(()) as server:
        assert len(server.ranks()) == 1
        assert server.named(WORKER_PROCESS_TYPE_IDLE_WORKER) == []
