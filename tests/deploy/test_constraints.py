"""The pinned versions are those of a package index, and its packages fit together."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from tests.system.server_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TIMEOUT_S = 600.0


def requirements(*extras: str, python: str) -> list[str]:
    """Return what the project requires with these extras on a version of Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional: Mapping[str, list[str]] = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras for line in optional[name])]
    minor = ".".join(python.split(".")[:2])
    needed = []
    for one in map(Requirement, lines):
        # pip reads markers as those of the Python that runs it.
        if one.marker is None or one.marker.evaluate({"python_version": minor}):
            one.marker = None
            needed.append(str(one))
    return needed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "constraints", "extras"),
    [
        # Of Debian 12.
        ("3.11.2", "constraints.txt", ("dev", "convert", "s3", "tracing")),
        ("3.12", "constraints.txt", ("dev", "convert", "s3", "tracing")),
        ("3.13", "constraints.txt", ("dev", "convert", "s3", "tracing")),
        ("3.14", "constraints.txt", ("dev", "convert", "s3", "tracing")),
        ("3.12", "deploy/constraints-cuda.txt", ("gpu", "tracing")),
    ],
)
def test_an_index_has_the_pinned_versions(
    tmp_path: Path, python: str, constraints: str, extras: tuple[str, ...]
) -> None:
    (tmp_path / "requirements.txt").write_text("\n".join(requirements(*extras, python=python)))
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--target", str(tmp_path / "none"), "--only-binary", ":all:"]
    # The index is asked for the requirements of a package, and not for all of it.
    command += ["--python-version", python, "--use-feature=fast-deps"]
    command += ["--constraint", str(ROOT / constraints)]
    command += ["--requirement", str(tmp_path / "requirements.txt")]
    # Wheels on this machine, such as torch for CPUs, may require less than those of the index.
    environment = {key: value for key, value in os.environ.items() if key != "PIP_FIND_LINKS"}
    done = subprocess.run(
        command,
        env={**environment, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
