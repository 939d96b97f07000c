"""Prints what a wheel of this project depends on, one requirement a line.

Dependencies are installed before the wheel is, so that a change of our code leaves their layer of
the image as it is. Arguments are names of extras.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = [line for name in sys.argv[1:] for line in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
