"""Kernels compiled side by side are those that launches find, in memory and on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.server_process import ROOT

pytest.importorskip("triton")

CASE = "sums over ranks"


# Any: JSON values
def compiled(folder: Path, *options: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.attention.kernels.hopper.compile_in_parallel",
            CASE,
            *options,
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(folder)},
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: dict[str, Any] = json.loads(process.stdout)
    return found


@pytest.mark.slow
def test_launches_find_what_threads_have_compiled(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    assert first["compiled"] == len(first["hashes"]) > 4
    assert first["missing"] == 0
    kernels = {path.name for path in tmp_path.iterdir()}
    assert len(kernels) == first["compiled"]
    # Launches of a process that compiles one kernel after the other find them on the disk.
    assert compiled(tmp_path, "--serially")["hashes"] == first["hashes"]
    assert {path.name for path in tmp_path.iterdir()} == kernels
