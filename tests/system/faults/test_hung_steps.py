"""A server whose scheduler never returns ends for its supervisor."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc
from tests.orphan_guard import guarded_process
from tests.system.server_process import TINY_LLAMA, ready_line, serve_command

# Waits are shorter than in a server that users start.
PROGRAM = """
import sys
from cluster.cli import exit_guard
from cluster.cli.commands import main
from cluster.engine import step_loop
from cluster.scheduling.scheduler import Scheduler

step_loop._FATAL_STALL_S = 2.0
guard = exit_guard._guard
exit_guard._guard = lambda engine, loop, limit_s: guard(engine, loop, 5.0)
schedule = Scheduler.schedule

def schedule_or_hang(self, now_s):
    while self.num_open > 1:
        pass
    return schedule(self, now_s)

Scheduler.schedule = schedule_or_hang
sys.exit(main())
"""


def read_repeatedly(url: str) -> None:
    """Read a page, which a server answers until the second request is scheduled."""
    for _ in range(200):
        httpx.get(url, timeout=60.0)


@pytest.mark.slow
def test_a_server_whose_steps_hang_under_their_lock_ends() -> None:
    """The second request makes the step thread hang; the third one blocks the event loop."""
    command, environment = serve_command(
        TINY_LLAMA, "--device=cpu", "--executor=local", "--num-threads=1"
    )
    program = [sys.executable, "-c", PROGRAM, *command[3:]]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(guarded_process(program, environment, stdout=subprocess.PIPE))
        http_port, grpc_port = re.findall(r":(\d+)", ready_line(process))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{grpc_port}"))
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        sampling = pagedray_pb2.SamplingParams(max_tokens=900, ignore_eos=True)
        first = service.Generate(pagedray_pb2.GenerateRequest(text="x", sampling=sampling))
        next(first)
        second = service.Generate(pagedray_pb2.GenerateRequest(text="y", sampling=sampling))
        with pytest.raises(httpx.HTTPError):
            read_repeatedly(f"http://127.0.0.1:{http_port}/metrics")
        for stream in (first, second):
            with pytest.raises(grpc.RpcError) as ended:
                list(stream)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(60.0) == 1
