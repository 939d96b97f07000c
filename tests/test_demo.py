"""The demo of `make demo`."""

from __future__ import annotations

import signal
import sys

import psutil
import pytest

from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.process_ends import still_running


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_ends_the_server_with_the_demo(number: signal.Signals) -> None:
    command = [sys.executable, "scripts/demo.py", "--tensor-parallel-size=1"]
    with guarded_process(command) as demo:
        server: list[psutil.Process] = []

        def has_server() -> bool:
            server[:] = psutil.Process(demo.pid).children()
            return bool(server) and "cluster.cli" in server[0].cmdline()

        wait_for(has_server)
        demo.send_signal(number)
        assert demo.wait(60.0) == 128 + number
    assert still_running(server, 60.0) == []
