"""The end of a process of Ray while a server streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import psutil

from tests.fakes import wait_for
from tests.process_ends import still_running
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import ServerProcess

NUM_STREAMS = 16
FINISHED = GrpcStream(num_tokens=100, end="FINISH_REASON_LENGTH")


def check_streams_finish(
    server: ServerProcess, log: Path, break_ray: Callable[[], object], *, reason: str
) -> None:
    """Break Ray; the streams must finish, and the server exit to be restarted."""
    family, num_logged = server.family(), len(log.read_text())
    with GrpcStreams(server, num_streams=NUM_STREAMS, num_tokens=100) as streams:
        streams.start()
        break_ray()
        # The server may even have exited.
        wait_for(lambda: not _is_ready(server), 10.0)
        assert streams.ended(60.0) == [FINISHED] * NUM_STREAMS
    # A supervisor restarts what fails.
    assert server.wait(60.0) == 1
    logged = log.read_text()[num_logged:].splitlines()
    lines = [line for line in logged if not line.endswith(" ...")]
    assert [reason in line for line in lines] == [True], lines
    assert_ended(family)


def assert_ended(processes: list[psutil.Process]) -> None:
    """Fail unless the processes end within a minute."""
    assert still_running(processes, 60.0) == []


def _is_ready(server: ServerProcess) -> bool:
    try:
        return server.is_ready()
    except httpx.TransportError:
        return False
