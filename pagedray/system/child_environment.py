"""The environment of processes that run our modules."""

from __future__ import annotations

import os
import sys

__all__ = ["child_environment"]


def child_environment() -> dict[str, str]:
    """Return an environment in which a Python process finds the packages that this one does."""
    # They may be found on this process's path without being installed.
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
