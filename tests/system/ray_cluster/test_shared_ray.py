"""The Ray cluster of a test process is started beside no thread of gRPC, and ends with it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import ray

from tests.process_ends import still_running
from tests.system.server_process import ROOT

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
