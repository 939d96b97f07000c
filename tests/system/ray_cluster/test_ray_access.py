"""A Ray that requires no token is used only if that is allowed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.orphan_guard import guarded_process
from tests.system.server_process import ROOT, TINY_LLAMA, ready_line, serve_command

DISABLED = {"RAY_AUTH_MODE": "disabled"}


def test_ray_without_a_token_has_to_be_allowed() -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    done = subprocess.run(
        command,
        env={**environment, **DISABLED},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert "RAY_AUTH_MODE=disabled" in line
    assert "--allow-unauthenticated-ray" in line


@pytest.mark.slow
def test_allowed_ray_without_a_token_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", "--allow-unauthenticated-ray")
    with (
        log.open("w") as errors,
        guarded_process(
            command, {**environment, **DISABLED}, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        ready_line(process)
        process.terminate()
        assert process.wait(120.0) == 0
    assert "does not require a token" in log.read_text()
