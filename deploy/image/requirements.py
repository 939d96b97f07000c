"""Prints the dependencies of this project's wheel, one requirement per line.

They are installed before the wheel, so that code changes do not invalidate their layer of the
image. The arguments are names of extras.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [line for name in sys.argv[1:] for line in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
