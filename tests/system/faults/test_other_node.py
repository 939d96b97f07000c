"""Ranks on another node than the controller's are reached over TCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.system.server_process import ROOT, TINY_LLAMA


def run_apart(*arguments: str) -> list[Any]:  # Any: JSON values
    """Run the program, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.faults.other_node", str(TINY_LLAMA), *arguments],
        cwd=ROOT,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", '"'))]


@pytest.mark.slow
def test_ranks_on_other_nodes_serve() -> None:
    alone, rejection, apart = run_apart()
    assert alone["families"] == apart["families"] == ["AF_INET"]
    assert alone["hosts"] == ["127.0.0.1"]
    assert "--placement-strategy PACK" in rejection
    assert sorted(apart["hosts"]) == ["127.0.0.2", "127.0.0.3"]
    assert len(alone["token_ids"]) == 8
    assert apart["token_ids"] == alone["token_ids"]


@pytest.mark.slow
def test_rank_that_hangs_on_another_node_is_replaced() -> None:
    (report,) = run_apart("hang")
    print(f"paused for {report['pause_s']:.1f} s")
    assert report["is_equal"]
    # To Ray, a stopped process is alive: its reports are missing, and it is killed on its node.
    assert report["replacements"] == {"death": 0, "hang": 1}
    assert report["had_ended"]


@pytest.mark.slow
def test_rank_whose_node_is_lost_goes_on_on_another_node() -> None:
    (report,) = run_apart("lose")
    print(f"paused for {report['pause_s']:.1f} s")
    assert report["is_equal"]
