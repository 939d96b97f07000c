"""Logs of replicas reach the container's standard error, and Ray's log files stay small."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.deploy.kustomize import overlay, parse_quantity

_SCALE = 256
"""The volume and the files are smaller than in the manifest by this factor, to write less."""
_NUM_LINES = 20000
_LINE_BYTES = 1000


@pytest.mark.slow
def test_a_replica_logs_more_than_its_volume_holds() -> None:
    cluster = overlay("cpu-demo")["RayService", "pagedray"]["spec"]["rayClusterConfig"]
    pod = cluster["workerGroupSpecs"][0]["template"]["spec"]
    [container] = pod["containers"]
    env = {one["name"]: one["value"] for one in container["env"]}
    [limit] = [one["emptyDir"] for one in pod["volumes"] if one["name"] == "ray-logs"]
    volume_bytes = parse_quantity(limit["sizeLimit"]) // _SCALE
    assert volume_bytes < _NUM_LINES * _LINE_BYTES
    max_bytes = int(env["RAY_ROTATION_MAX_BYTES"]) // _SCALE
    num_files = 1 + int(env["RAY_ROTATION_BACKUP_COUNT"])
    env |= {"RAY_ROTATION_MAX_BYTES": str(max_bytes), "PYTHONUNBUFFERED": "1"}
    script = Path(__file__).with_name("logging_replica.py")
    # The path of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, str(script), folder, str(_NUM_LINES)],
            env=os.environ | env,
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    written = [int(number) for number in re.findall(r"line (\d+) x", done.stderr)]
    assert written == list(range(_NUM_LINES))
    # Serve's own line about the call may follow.
    assert any(f"record {_NUM_LINES - 1} " in line for line in report["last_lines"])
    sizes = report["sizes"]
    assert max(sizes.values()) <= max_bytes
    of_replica = [size for name, size in sizes.items() if "replica_" in name]
    assert len(of_replica) == num_files
    # Neither stream of the replica fills the volume, and both keep their newest lines.
    assert report["used_bytes"] < volume_bytes // 2
