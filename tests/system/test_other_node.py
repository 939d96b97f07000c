"""Ranks on another node than the controller's are reached over TCP."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.system.server_process import ROOT, TINY_LLAMA


def test_ranks_on_another_node_serve() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "system" / "other_node.py"), str(TINY_LLAMA)],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["AF_INET 8"]
