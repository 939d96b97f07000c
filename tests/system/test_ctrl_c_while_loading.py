"""Ctrl-C during loading ends the server and its child processes within seconds."""

from __future__ import annotations

import signal
import subprocess
import time

import psutil
import pytest

from tests.system.server_process import TINY_LLAMA, serve_command


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_ctrl_c_while_loading_ends_all_within_five_seconds(executor: str) -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", f"--executor={executor}")
    with subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        # The first line reports progress.
        process.stderr.readline()
        time.sleep(0.5)
        family = psutil.Process(process.pid).children(recursive=True)
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(30.0)
        assert time.monotonic() - started_s < 15.0
    _, alive = psutil.wait_procs(family, timeout=15.0)
    assert alive == []
