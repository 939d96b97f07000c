"""The end of the head of a real Ray cluster: alone, beside a worker that drains, and killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cluster.cli.deploy_hold import GcsNodes, wait_for_drains
from tests.fakes import wait_for
from tests.system.ray_cluster.ray_nodes import DRAIN_S, RayNodes

pytestmark = pytest.mark.slow


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


def test_a_head_continues_from_the_state_of_the_one_that_was_killed(kept_nodes: RayNodes) -> None:
    num_calls, pid = kept_nodes.call()
    assert num_calls == 2
    kept_nodes.kill_head()
    kept_nodes.start_head()
    # The worker and its actor, which has its memory, are those from before.
    assert kept_nodes.call() == (3, pid)
