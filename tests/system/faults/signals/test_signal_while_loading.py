"""A signal during loading ends the server and its child processes before it has loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress

import psutil
import pytest

from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.system.server_process import TINY_LLAMA, serve_command


@pytest.mark.parametrize(
    ("executor", "number", "last_line"),
    [
        pytest.param("local", signal.SIGINT, "", marks=pytest.mark.slow),
        ("ray", signal.SIGINT, "Starting Ray"),
        pytest.param("ray", signal.SIGTERM, "Starting Ray", marks=pytest.mark.slow),
        pytest.param("ray", signal.SIGTERM, "Starting 1 rank", marks=pytest.mark.slow),
    ],
)
def test_signal_while_loading_ends_all_before_it_has_loaded(
    executor: str, number: signal.Signals, last_line: str
) -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", f"--executor={executor}")
    pipe = subprocess.PIPE
    with guarded_process(command, environment, stdout=pipe, stderr=pipe) as process:
        assert process.stderr is not None
        # Each line reports progress.
        while last_line not in process.stderr.readline():
            continue
        if executor == "ray":
            # Amid the start of Ray's processes; a local rank may be ready by then.
            time.sleep(0.5)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120.0)
        assert process.returncode == 0
        # It did not finish loading.
        assert output == ""
    # Those too that started after the signal.
    wait_for(lambda: not _running_in_session(process.pid))


def _running_in_session(number: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == number and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
