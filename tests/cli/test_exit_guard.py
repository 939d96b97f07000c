"""A server that cannot stop by itself ends: real processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

from tests.system.server_process import ROOT

PROGRAM = """
import asyncio, time
from types import SimpleNamespace
from cluster.cli.server import guard_exit

async def serve():
    guard_exit(SimpleNamespace(error={error}), asyncio.get_running_loop(), limit_s=1.0)
    {serving}

asyncio.run(serve())
"""


CASES = {
    "the loop stands still": ("'It hangs.'", "time.sleep(30.0)", 1),
    "the loop runs": ("'It hangs.'", "await asyncio.sleep(4.0)", 0),
    "the engine runs": ("None", "time.sleep(4.0)", 0),
}
"""The error of the engine, what the server does, and how it exits."""


def test_a_server_that_cannot_stop_is_ended() -> None:
    with ExitStack() as stack:
        # Together, since each waits for seconds.
        servers = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", PROGRAM.format(error=error, serving=serving)], cwd=ROOT
                )
            )
            for name, (error, serving, _) in CASES.items()
        }
        codes = {name: server.wait(60.0) for name, server in servers.items()}
    assert codes == {name: code for name, (_, _, code) in CASES.items()}
