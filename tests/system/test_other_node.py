"""Ranks on another node than the controller's are reached over TCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.system.server_process import ROOT, TINY_LLAMA


def test_ranks_on_other_nodes_serve() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.other_node", str(TINY_LLAMA)],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    alone, refusal, apart = map(json.loads, done.stdout.splitlines()[-3:])
    assert alone["families"] == apart["families"] == ["AF_INET"]
    assert alone["hosts"] == ["127.0.0.1"]
    assert "--placement-strategy PACK" in refusal
    assert sorted(apart["hosts"]) == ["127.0.0.2", "127.0.0.3"]
    assert len(alone["token_ids"]) == 8
    assert apart["token_ids"] == alone["token_ids"]
