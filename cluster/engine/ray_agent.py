"""Runs an agent of Ray, which is killed when its raylet ends: `python ray_agent.py PROGRAM ...`.

By itself, an agent notices the end of its raylet only after it has reached GCS, for which it waits
as long as `RayEnvironment` says. This program imports nothing of Ray.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Option of prctl(2) for the signal that a process receives when its parent ends."""
_RAYLET_PID = "RAY_RAYLET_PID"
"""A variable that the raylet sets for its agents."""


def main() -> None:
    """Run the program that the arguments name, in place of this program."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(_RAYLET_PID) not in (None, str(os.getppid())):
        # It has ended before.
        return
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
