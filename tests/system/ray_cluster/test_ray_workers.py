"""A Ray that the engine has started runs no workers but the ranks."""

from __future__ import annotations

import os

import pytest
from ray._private.ray_constants import WORKER_PROCESS_TYPE_IDLE_WORKER

from tests.system.server_process import ServerProcess


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="Ray would start one worker, which is the rank")
def test_only_ranks_are_started() -> None:
    with ServerProcess(()) as server:
        assert len(server.ranks()) == 1
        assert server.named(WORKER_PROCESS_TYPE_IDLE_WORKER) == []
