"""A server whose output goes to a full disk serves all the same."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests.fakes import wait_for
from tests.orphan_guard import guarded_process
from tests.system.server_process import TINY_LLAMA, free_port, serve_command

FULL = Path("/dev/full")


@pytest.mark.slow
def test_output_on_a_full_disk_is_lost_and_nothing_else() -> None:
    port = free_port()
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", f"--http-port={port}")
    with (
        FULL.open("w") as full,
        guarded_process(command, environment, stdout=full, stderr=full) as server,
    ):
        wait_for(lambda: server.poll() is not None or is_ready(port), timeout_s=120.0)
        assert is_ready(port)
        body = {"model": "tiny-llama", "prompt": "import", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
        assert answer.status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(60.0) == 0


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False
