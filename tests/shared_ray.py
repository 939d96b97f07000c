"""A local Ray cluster that another process starts, and that ends with the process that uses it.

Ray forks its daemons. In a process with threads of gRPC, as tests have, a child may hang before it
runs the daemon, and Ray then waits for it.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import IO, Self

_ROOT = Path(__file__).resolve().parent.parent
_START_TIMEOUT_S = 90.0
"""Longer than the time limits of Ray."""
_END_TIMEOUT_S = 60.0
_NUM_STARTS = 3
"""A busy machine may take longer than Ray waits for a daemon."""


class SharedRay:
    """A Ray cluster while it is entered."""

    def __init__(self) -> None:
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the cluster. Raises AssertionError if it does not start."""
        for _ in range(_NUM_STARTS):
            self._process = _start()
            assert self._process.stdout is not None
            self.address = _line(self._process.stdout, _START_TIMEOUT_S)
            if self.address:
                return self
            # The daemons end with the process that has started them.
            self._process.kill()
            self._process.communicate()
        raise AssertionError("Ray did not start; its messages are above")

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        # Closes its input.
        self._process.communicate(timeout=_END_TIMEOUT_S)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.shared_ray"],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _line(output: IO[str], timeout_s: float) -> str:
    """Return the first line, or nothing if there is none in time."""
    readable, _, _ = select.select([output], [], [], timeout_s)
    return output.readline().strip() if readable else ""


def main() -> None:
    """Start Ray, print its address, and stop it at the end of the input."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    os.write(1, f"{ray.get_runtime_context().gcs_address}\n".encode())
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
