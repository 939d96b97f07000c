"""Runs a Serve replica that logs much, and prints what is in Ray's folder of logs.

The arguments are Ray's temporary folder and a number of lines. Each line is written to standard
error and once to Serve's log. It prints a line of JSON: the last lines of Serve's log, the size of
each file in bytes, and what all files in Ray's folder occupy on disk.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import ray
from ray import serve
from ray.serve import Deployment

_LINE = "x" * 1000


class Talker:
    """A replica that logs."""

    def talk(self, num_lines: int) -> None:
        """Write lines to standard error and to Serve's log."""
        logger = logging.getLogger("ray.serve")
        for number in range(num_lines):
            print(f"line {number} {_LINE}", file=sys.stderr)
            logger.info("record %d %s", number, _LINE)


def main(folder: str, num_lines: str) -> None:
    """Start Ray, log, and report."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(proxy_location="Disabled")
    # Its stubs return the class itself.
    deployment: object = serve.deployment(Talker)
    assert isinstance(deployment, Deployment)
    serve.run(deployment.bind()).talk.remote(int(num_lines)).result(timeout_s=120)
    logs = Path(folder, "session_latest", "logs").resolve()
    files = {str(one.relative_to(logs)): one for one in logs.rglob("*") if one.is_file()}
    [replica] = [one for name, one in files.items() if "replica_" in name and name.endswith(".log")]
    report = {
        "last_lines": replica.read_text().splitlines()[-2:],
        "sizes": {name: one.stat().st_size for name, one in files.items()},
        "used_bytes": sum(one.lstat().st_blocks * 512 for one in Path(folder).rglob("*")),
    }
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
