"""SIGTERM for a whole process group ends the server although Ray's processes end at the same time.

`timeout`, and systemd with its default KillMode, send it in this way.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.system.ray_cluster.ray_end import assert_ended
from tests.system.server_process import ServerProcess


@pytest.mark.slow
def test_server_ends_together_with_ray() -> None:
    with ServerProcess(()) as server:
        family = server.family()
        # The server leads a session of its own.
        os.killpg(server.pid, signal.SIGTERM)
        assert server.wait(60.0) == 0
        assert_ended(family)
