"""The documents name the versions of Python that the package declares."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.system.server_process import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "Makefile", "README.md", "docs/quickstart.md"])
def test_the_oldest_version_is_named(name: str) -> None:
    assert PROJECT["requires-python"] == f">={VERSIONS[0]}"
    assert f"Python {VERSIONS[0]} or later" in (ROOT / name).read_text()


def test_the_tested_versions_are_named() -> None:
    text = " ".join((ROOT / "docs/quickstart.md").read_text().split())
    assert f"tested on {VERSIONS[0]} to {VERSIONS[-1]};" in text
